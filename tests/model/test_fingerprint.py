"""Identities: what they ignore, what they see, what they survive."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from layoutsearch.model import canonicalize, fingerprint, kind_of, op_ids
from tests.models import nets


def chain(
    seed: int = 0, stride: int = 1, out: int = 24, scalar: float = 0.5, height: int = 9, extra: bool = False
) -> tvm.IRModule:
    """Two convolutions with a scalar in between; `extra` puts unrelated ops in front."""

    def body(n: nets.Net, x: relax.Expr) -> relax.Expr:
        if extra:
            x = n.emit(relax.op.abs(n.emit(relax.op.nn.max_pool2d(x, pool_size=3, padding=1))))
        y = n.relu(n.conv(x, 16))
        y = n.emit(relax.op.multiply(y, relax.const(np.float32(scalar))))
        return n.conv(y, out, stride=stride)

    return canonicalize(nets.build((1, 8, height, 11), body=body, seed=seed))


def test_weights_do_not_matter() -> None:
    assert fingerprint(chain(seed=0)) == fingerprint(chain(seed=1))
    assert op_ids(chain(seed=0)) == op_ids(chain(seed=1))


def test_everything_else_does() -> None:
    variants = [chain(), chain(stride=2), chain(out=32), chain(scalar=0.25), chain(height=13), chain(extra=True)]
    prints = [fingerprint(module) for module in variants]
    assert len(set(prints)) == len(prints)
    assert all(re.fullmatch(r"[0-9a-f]{64}", text) for text in prints)


def test_another_type_is_another_model() -> None:
    def module(dtype: str) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((2, 3), dtype))
        with builder.function("main", [x]):
            with builder.dataflow():
                y = builder.emit_output(relax.op.nn.relu(x))
            builder.emit_func_output(y)
        return canonicalize(builder.get())

    assert fingerprint(module("float32")) != fingerprint(module("float16"))
    assert set(op_ids(module("float32")).values()).isdisjoint(op_ids(module("float16")).values())


def test_names_of_variables_do_not_matter() -> None:
    @I.ir_module
    class One:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            with R.dataflow():
                y = R.nn.relu(x)
                z = R.add(y, x)
                R.output(z)
            return z

    @I.ir_module
    class Two:
        @R.function
        def main(picture: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            with R.dataflow():
                bright = R.nn.relu(picture)
                total = R.add(bright, picture)
                R.output(total)
            return total

    assert fingerprint(One) == fingerprint(Two)
    assert list(op_ids(One).values()) == list(op_ids(Two).values())
    assert list(op_ids(One)) == ["y", "z"]


def test_stable_across_processes() -> None:
    script = (
        "from tests.models import nets\nfrom layoutsearch.model import *\n"
        "c = canonicalize(nets.mixed()); print(fingerprint(c), *op_ids(c).values())"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    here = canonicalize(nets.mixed())
    assert run.stdout.split() == [fingerprint(here), *op_ids(here).values()]


def test_ids_survive_an_unrelated_op() -> None:
    plain, extended = op_ids(chain()).values(), op_ids(chain(extra=True)).values()
    assert set(plain) < set(extended)


def test_ids_name_each_call_once() -> None:
    module = canonicalize(nets.residual(blocks=3))
    ids = op_ids(module)
    bound = [b.var.name for b in module["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert list(ids) == bound
    assert len(set(ids.values())) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9_]+:[0-9a-f]{8}:\d+", name) for name in ids.values())
    # The second and third block are alike: their convolutions differ in the ordinal alone.
    stems = [name.rsplit(":", 1) for name in ids.values() if name.startswith("conv2d:")]
    assert [stem for stem, _ in stems] == [stems[0][0]] * 3
    assert [ordinal for _, ordinal in stems] == ["0", "1", "2"]


def conv_kind(data: Sequence[int], weight: Sequence[int], **attributes: object) -> str:
    x = relax.Var("x", relax.TensorType(tuple(data), "float32"))
    w = relax.Var("w", relax.TensorType(tuple(weight), "float32"))
    return kind_of(relax.op.nn.conv2d(x, w, **attributes))


def test_kinds_of_convolutions() -> None:
    assert conv_kind((1, 8, 9, 9), (16, 8, 3, 3)) == "conv2d"
    assert conv_kind((1, 8, 9, 9), (16, 8, 1, 1)) == "conv2d_pointwise"
    assert conv_kind((1, 8, 9, 9), (16, 8, 1, 3)) == "conv2d"
    assert conv_kind((1, 8, 9, 9), (8, 1, 3, 3), groups=8) == "conv2d_depthwise"
    assert conv_kind((1, 8, 9, 9), (16, 1, 3, 3), groups=8) == "conv2d_depthwise"
    assert conv_kind((1, 8, 9, 9), (16, 4, 3, 3), groups=2) == "conv2d_grouped"
    assert conv_kind((1, 8, 9, 9), (16, 4, 1, 1), groups=2) == "conv2d_grouped"
    assert conv_kind((1, 1, 9, 9), (16, 1, 3, 3)) == "conv2d"


def test_kinds_do_not_depend_on_the_layout() -> None:
    assert conv_kind((1, 9, 9, 8), (1, 1, 8, 16), data_layout="NHWC", kernel_layout="HWIO") == "conv2d_pointwise"
    packed = {"data_layout": "NCHW8c", "kernel_layout": "OIHW8i16o", "out_layout": "NCHW16c"}
    assert conv_kind((1, 1, 9, 9, 8), (1, 1, 3, 3, 8, 16), **packed) == "conv2d"
    assert conv_kind((1, 1, 9, 9, 8), (1, 1, 1, 1, 8, 16), **packed) == "conv2d_pointwise"
    depthwise = {"data_layout": "NCHW8c", "kernel_layout": "OIHW8o", "out_layout": "NCHW8c", "groups": 8}
    assert conv_kind((1, 1, 9, 9, 8), (1, 1, 3, 3, 8), **depthwise) == "conv2d_depthwise"


def test_kinds_of_other_ops() -> None:
    kinds = {name.split(":")[0] for name in op_ids(canonicalize(nets.mixed())).values()}
    assert {"max_pool2d", "avg_pool2d", "resize2d", "clip", "split", "concat", "pad", "relu"} <= kinds
    assert "conv2d_transpose" in {name.split(":")[0] for name in op_ids(canonicalize(nets.transposed())).values()}
    external = relax.op.call_dps_packed("their.kernel", [], out_ty=relax.TensorType((2,), "float32"))
    assert kind_of(external) == "extern"
