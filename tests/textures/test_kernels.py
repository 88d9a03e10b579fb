"""Single kernels with textures, as they are built to be timed: arguments in their scopes, and schedules that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm

from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.scopes import GLOBAL, TEXTURE, TEXTURE_WEIGHT
from layoutsearch.measure.device import Device
from layoutsearch.measure.kernels import TensorSpec
from layoutsearch.plan.apply import target_json
from layoutsearch.schedule import TargetInfo, dispatch
from layoutsearch.schedule.value import Schedule, ScheduleError
from layoutsearch.search.jobs import KernelJob, build_kernels, lowered_kernel
from layoutsearch.search.setup import template_versions
from layoutsearch.search.workloads import KernelNode, kernel_nodes
from layoutsearch.targets import as_target, has_feature
from tests.models import nets
from tests.textures.programs import TARGET
from tests.textures.scoped import case_of

INFO = TargetInfo.from_target(TARGET, 1)


def residual_kernel() -> KernelNode:
    """A 3x3 convolution with bias, ReLU and a residual sum."""

    def body(n: nets.Net, x: Any) -> Any:
        y, z = n.conv_relu(x, 12, 1), n.conv_relu(x, 12, 1)
        return n.emit(tvm.relax.op.add(n.relu(n.conv(y, 12)), z))

    case = case_of(nets.build((1, 8, 6, 7), body=body))
    nodes = kernel_nodes(case.module, case.graph, case.spaces)
    return next(node for node in nodes if "k12x12x3x3" in node.workload.summary)


def job(node: KernelNode, choice: Candidate, output: Path, **more: Any) -> KernelJob:
    w = node.workload
    return KernelJob(w.module_json, w.axes, w.members, str(choice), target_json(TARGET), 1, (), 2, str(output), **more)


def test_a_kernel_is_built_with_arguments_in_their_scopes(tmp_path: Path) -> None:
    """Data are where the result is, weights where they are asked for; bias and residual operand in buffers."""
    node = residual_kernel()
    choice = Candidate.of("NCHW4c", "OIHW4o", "NCHW4c", scope=TEXTURE, weight_scope=TEXTURE_WEIGHT)
    assert choice in node.choices
    built = build_kernels(job(node, choice, tmp_path / "k.so"))
    specs = [TensorSpec(*arg) for arg in built.args]
    data = (1, 3, 6, 7, 4)
    assert [(spec.shape, spec.scope) for spec in specs] == [
        (data, TEXTURE), ((3, 12, 3, 3, 4), TEXTURE_WEIGHT), ((1, 3, 1, 1, 4), GLOBAL), (data, GLOBAL), (data, TEXTURE)
    ]  # fmt: skip
    assert len(built.schedules) == 2
    assert built.failed == ()
    assert Path(built.output).stat().st_size > 0


def test_a_kernel_without_textures_has_plain_arguments(tmp_path: Path) -> None:
    node = residual_kernel()
    built = build_kernels(job(node, Candidate.of("NCHW", "OIHW", "NCHW"), tmp_path / "k.so"))
    assert all(len(arg) == 2 for arg in built.args)


@pytest.mark.parametrize("threads", [1, 32, 64, 256])
def test_groups_of_work_items_are_whole_rows(threads: int, tmp_path: Path) -> None:
    node = residual_kernel()
    func = lowered_kernel(job(node, Candidate.of("NCHW4c", "OIHW4o", "NCHW4c"), tmp_path / "k.so"))
    emitted = dispatch.apply(func, Schedule.make("workitems", threads=threads), INFO)
    nest = emitted.body.block.body
    groups, items = int(nest.extent), int(nest.body.extent)
    assert groups * items == 3 * 6 * 7
    assert items == {1: 1, 32: 21, 64: 42, 256: 126}[threads]


def test_schedules_are_for_their_kind_of_target() -> None:
    node = residual_kernel()
    func = lowered_kernel(job(node, Candidate.of("NCHW4c", "OIHW4o", "NCHW4c"), Path("k.so")))
    assert {s.template for s in dispatch.candidates(func, INFO)} == {"workitems"}
    cpu = TargetInfo.from_target(as_target(None), 1)
    with pytest.raises(ScheduleError, match="workitems is not for"):
        dispatch.apply(func, Schedule.make("workitems", threads=64), cpu)
    with pytest.raises(ScheduleError, match="loops is not for"):
        dispatch.apply(func, Schedule.make("loops"), INFO)


def test_records_of_cpus_are_as_they_were() -> None:
    """Templates of other targets do not tell CPU records apart."""
    assert "workitems" not in template_versions()
    assert "workitems1" in template_versions(TARGET)
    assert template_versions(as_target(None)) == template_versions()


def test_what_targets_have_textures() -> None:
    targets = ["qcom/adreno-opencl-texture", "qcom/adreno-opencl", {"kind": "opencl"}, "qcom/adreno-vulkan-texture"]
    assert [has_feature(as_target(t), "texture") for t in targets] == [True, False, False, False]
    assert not has_feature(as_target(None), "texture")


def test_a_device_says_that_it_has_no_opencl() -> None:
    with Device.local(threads=1) as device:
        with pytest.raises(Exception, match=r"device 'local' cannot run opencl: give --rpc HOST:PORT"):
            device.check_target(TARGET)
        # Still good for what it can run.
        device.check_target(as_target(None))
        assert device.has_function("runtime.NumThreads")


def test_a_target_with_the_host_of_a_phone() -> None:
    phone = {"tag": "qcom/adreno-opencl-texture", "host": {"kind": "llvm", "mtriple": "aarch64-linux-android"}}
    target = as_target(phone)
    again = tvm.target.Target(target_json(target))
    assert target_json(again) == target_json(target)
    assert str(again.host.attrs["mtriple"]) == "aarch64-linux-android"
    assert has_feature(again, "texture")
