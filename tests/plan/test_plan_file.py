"""plan.json: what is written is read, and what is not a plan of ours is refused in one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layoutsearch.errors import PlanError
from layoutsearch.plan.plan import LayoutPlan
from layoutsearch.plan.schema import SCHEMA_ID, SECTIONS


def _refused(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        LayoutPlan.load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_round_trip(plan: LayoutPlan, tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    plan.save(path)
    again = LayoutPlan.load(path)
    assert again == plan
    assert again.to_json() == plan.to_json() == json.loads(path.read_text())
    assert again.shapes == {"x": (1, 3, 16, 16), "x1": (1, 16, 8, 8)}
    assert again.threads == 2


def test_sections_and_fields(plan: LayoutPlan) -> None:
    data = plan.to_json()
    assert data["schema"] == SCHEMA_ID == "layoutsearch.plan/1"
    assert set(data) == {"schema", "digests", *SECTIONS}
    assert set(data["digests"]) == set(SECTIONS)
    documented = {
        "id", "kind", "workload", "data_layout", "kernel_layout", "out_layout", "scope", "algorithm", "schedule",
        "predicted_us", "measured_us", "why",
    }  # fmt: skip
    assert all(documented <= set(op) for op in data["ops"])
    assert all({"tensor", "from", "to", "bytes", "us", "why"} <= set(t) for t in data["transforms"])


def test_save_replaces_at_once_and_leaves_nothing_behind(plan: LayoutPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("older")
    plan.save(path)
    assert LayoutPlan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_save_that_fails_keeps_the_older_file(
    plan: LayoutPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(PlanError, match="No space left"):
        plan.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_that_cannot_be_made(plan: LayoutPlan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot write plan"):
        plan.save(tmp_path / "file" / "plan.json")


@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.9, 0.999])
def test_truncated(plan: LayoutPlan, tmp_path: Path, keep: float) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text().rstrip()
    path.write_text(text[: int(keep if keep >= 1 else keep * len(text))])
    assert "not complete JSON" in _refused(path)


def test_missing_binary_and_foreign_files(tmp_path: Path) -> None:
    assert "no.json" in _refused(tmp_path / "no.json")
    (tmp_path / "binary").write_bytes(b"\x80\x81\xff")
    assert "binary" in _refused(tmp_path / "binary")
    assert _refused(tmp_path)
    for text in ("[]", "3", '{"nodes": []}', "null"):
        (tmp_path / "other.json").write_text(text)
        assert "is not a layout plan" in _refused(tmp_path / "other.json")


def test_unknown_schema_names_both(plan: LayoutPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan.to_json(), "schema": "layoutsearch.plan/99"}))
    message = _refused(path)
    assert "layoutsearch.plan/99" in message
    assert SCHEMA_ID in message


def _first_with_schedule(data: dict[str, Any]) -> dict[str, Any]:
    return next(op for op in data["ops"] if op["schedule"] and op["schedule"]["params"])


def _edit_layout(data: dict[str, Any]) -> None:
    op = next(op for op in data["ops"] if op["out_layout"] == "NCHW")
    op["out_layout"] = "NHWC"


def _edit_schedule(data: dict[str, Any]) -> None:
    _first_with_schedule(data)["schedule"]["params"]["tile"] = 3


EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "version of TVM": ("tool", lambda d: d["tool"].update(tvm="0.28.0")),
    "cpu of the target": ("target", lambda d: d["target"].update(mcpu="core2")),
    "threads": ("device", lambda d: d["device"].update(threads=7)),
    "fingerprint": ("model", lambda d: d["model"].update(fingerprint="0" * 64)),
    "input shape": ("model", lambda d: d["model"]["inputs"][0].update(shape=[1, 3, 32, 32])),
    "layout": ("ops", _edit_layout),
    "schedule": ("ops", _edit_schedule),
    "kernel time": ("ops", lambda d: d["ops"][0].update(measured_us=1.0)),
    "op removed": ("ops", lambda d: d["ops"].pop()),
    "op repeated": ("ops", lambda d: d["ops"].append(d["ops"][0])),
    "transform": ("transforms", lambda d: d["transforms"][0].update(to="NCHW4c")),
    "transform removed": ("transforms", lambda d: d["transforms"].pop()),
    "prediction": ("objective", lambda d: d["objective"].update(predicted_us=10.5)),
    "speedup": ("validation", lambda d: d["validation"].update(speedup=2.0)),
    "verdict": ("validation", lambda d: d["validation"].update(accepted=False)),
    "digest": ("device", lambda d: d["digests"].update(device="0" * 16)),
    "digest removed": ("ops", lambda d: d["digests"].pop("ops")),
}


@pytest.mark.parametrize("what", EDITS)
def test_edited_by_hand_names_the_section(plan: LayoutPlan, tmp_path: Path, what: str) -> None:
    section, edit = EDITS[what]
    data = copy.deepcopy(plan.to_json())
    edit(data)
    assert data != plan.to_json()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert f"section {section!r}" in _refused(path)


def test_every_section_is_protected(plan: LayoutPlan) -> None:
    assert {section for section, _ in EDITS.values()} == set(SECTIONS)


BREAKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ops/0": lambda d: d["ops"][0].pop("why"),
    "device/threads": lambda d: d["device"].update(threads=0),
    "ops/0/data_layout": lambda d: d["ops"][0].update(data_layout=5),
    "speedup_ci": lambda d: d["validation"].update(speedup_ci=[1.0]),
    "surprise": lambda d: d["model"].update(surprise=1),
    "top level": lambda d: d.pop("objective"),
    "run": lambda d: d.update(run="os.system('true')"),
}


@pytest.mark.parametrize("where", BREAKS)
def test_what_breaks_the_schema_is_located(plan: LayoutPlan, tmp_path: Path, where: str) -> None:
    data = copy.deepcopy(plan.to_json())
    BREAKS[where](data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert where in _refused(path)


def test_only_schedules_from_the_allowed_list(plan: LayoutPlan) -> None:
    """Even with digests made anew nothing else is accepted: a plan is data."""
    from layoutsearch.plan.schema import digests

    for change in (
        {"template": "__import__"},
        {"version": 99},
        {"params": {"tile": "os.system('true')"}},
        {"params": {"tile": 10**9}},
    ):
        data = copy.deepcopy(plan.to_json())
        _first_with_schedule(data)["schedule"].update(change)
        data["digests"] = digests(data)
        with pytest.raises(PlanError, match=r"template|schedule"):
            LayoutPlan.from_json(data)


def test_impossible_layouts_are_refused(plan: LayoutPlan) -> None:
    from layoutsearch.plan.schema import digests

    for layout in ("NCHW0c", "nchw", "16c", "NCHW16c16c"):
        data = copy.deepcopy(plan.to_json())
        data["ops"][0]["data_layout"] = layout
        data["digests"] = digests(data)
        with pytest.raises(PlanError, match="op "):
            LayoutPlan.from_json(data)
