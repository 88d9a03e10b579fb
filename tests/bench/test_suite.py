"""The suite's rows and what is told where something is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import tvm

from layoutsearch.bench.model import bench_model
from layoutsearch.bench.suite import SUITE, bench_suite, chosen, over_best_runtime, summary, write_csv
from layoutsearch.errors import LayoutSearchError
from layoutsearch.zoo import MODELS
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target


def test_all_models_or_those_that_are_named() -> None:
    assert chosen([]) == list(SUITE)
    assert [m.name for m in chosen(["unet", "resnet50"])] == ["unet", "resnet50"]
    with pytest.raises(LayoutSearchError, match=r"--only 'alexnet': no model of the suite; they are resnet50, "):
        chosen(["alexnet"])


def test_every_source_is_known() -> None:
    assert all(m.source in MODELS or m.source.endswith(".onnx") for m in SUITE)


def test_without_a_plan_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "ch_ppocr_mobile_v2.0_cls_infer.onnx").write_bytes(b"")
    with pytest.raises(LayoutSearchError, match=r"run: layoutsearch tune \S+ --shape x=1,3,48,192 --out \S+ppocr_cls$"):
        bench_suite(chosen(["ppocr_cls"]), tmp_path, tmp_path, ["openvino"], threads=2, starts=1, rounds=2)


def test_means_are_geometric_and_against_the_better_runtime() -> None:
    rows = [
        {"speedup_over_onnxruntime": 4.0, "speedup_over_openvino": 2.0, "speedup_over_uniform": 1.0},
        {"speedup_over_onnxruntime": 0.5, "speedup_over_openvino": 3.0, "speedup_over_uniform": 4.0},
    ]
    assert [over_best_runtime(row) for row in rows] == [2.0, 0.5]
    assert summary(rows) == {
        "over_uniform": 2.0,
        "over_uniform_worst": 1.0,
        "over_best_runtime": 1.0,
        "over_best_runtime_worst": 0.5,
    }


def test_models_that_metaschedule_tuned_have_a_mean_of_their_own() -> None:
    rows = [{"speedup_over_uniform": 1.0, "speedup_over_metaschedule": x} for x in (2.0, 8.0)]
    assert summary([*rows, {"speedup_over_uniform": 1.0}]) == {
        "over_uniform": 1.0,
        "over_uniform_worst": 1.0,
        "over_metaschedule": 4.0,
        "over_metaschedule_worst": 2.0,
    }


def test_lines_of_models_that_were_not_timed_stay(tmp_path: Path) -> None:
    path = tmp_path / "out" / "suite.csv"
    write_csv([{"model": "unet", "plan_ms": 9.5}, {"model": "vgg16", "plan_ms": 7.0, "openvino_ms": 8.0}], path)
    write_csv([{"model": "resnet50", "plan_ms": 3.0}, {"model": "unet", "plan_ms": 9.0, "threads": 2}], path)
    assert path.read_text(encoding="utf-8").splitlines() == [
        "model,openvino_ms,plan_ms,threads",
        "resnet50,,3.0,",
        "vgg16,8.0,7.0,",
        "unet,,9.0,2",
    ]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "suite.csv").write_text("name,ms\nx,1\n", encoding="utf-8")
    with pytest.raises(LayoutSearchError, match=r"suite\.csv has no column 'model'.* another --out"):
        write_csv([{"model": "unet", "plan_ms": 9.0}], tmp_path / "suite.csv")


def test_without_another_runtime_there_is_nothing_to_say_of_one() -> None:
    assert set(summary([{"speedup_over_uniform": 1.1}])) == {"over_uniform", "over_uniform_worst"}


@pytest.mark.parametrize(("name", "words"), [("openvino", "OpenVINO"), ("onnxruntime", "ONNX Runtime")])
def test_a_runtime_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, words: str
) -> None:
    module, model, plan = two_in_three_out(), tmp_path / "model.json", tmp_path / "plan.json"
    model.write_text(tvm.ir.save_json(module), encoding="utf-8")
    make_plan(module, native_target()).save(plan)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else real(n, *a))
    with pytest.raises(LayoutSearchError, match=rf"{words} is not installed; run: pip install 'layoutsearch\[bench\]'"):
        bench_model(str(model), str(plan), [name])
