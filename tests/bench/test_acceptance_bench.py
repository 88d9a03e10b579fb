"""`bench acceptance`: samples that are kept, and statistics of them; the device's own noise is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tvm

from layoutsearch.bench import aa_samples
from layoutsearch.bench.aa_samples import Origin, Pair, Samples, measure_pairs
from layoutsearch.bench.acceptance import evaluate, write_results
from layoutsearch.errors import LayoutSearchError
from tests.cli.running import call
from tests.models.plans import make_plan, two_in_three_out
from tests.models.running import native_target

ORIGIN = Origin("net", "f00d", 500.0, "a CPU", 2, "0.1.0", "0.27.0")


def made(n: int, between: float, within: float, *, starts: int = 10, per_start: int = 6, favor: float = 0.0) -> Samples:
    rng = np.random.default_rng(0)
    pairs = []
    for k in range(n):
        own = rng.normal(0, between, (2, starts, 1))
        times = 500 * np.exp(own + rng.normal(0, within, (2, starts, per_start)))
        times[1] *= 1 - favor
        pairs.append(Pair(k, per_start, tuple(times[0].ravel()), tuple(times[1].ravel())))
    return Samples(ORIGIN, tuple(pairs))


def test_noise_and_power_are_found_in_samples(tmp_path: Path) -> None:
    samples = made(100, 0.008, 0.02)
    result = evaluate(samples)
    # Of the ratio of two sides.
    assert result.noise.within == pytest.approx(0.02 * 2**0.5, rel=0.15)
    assert result.noise.between == pytest.approx(0.008 * 2**0.5, rel=0.25)
    assert abs(result.noise.load_order) < 4 * result.noise.load_order_se
    assert result.false_wins.share <= 0.08
    assert result.power.share >= 0.8
    by_gain = {row.gain: row.share for row in result.rows if row.starts == 10}
    assert by_gain[0.0] <= by_gain[0.01] <= by_gain[0.02] <= by_gain[0.03] <= by_gain[0.05]
    assert all(row.low <= row.share <= row.high for row in result.rows)
    assert {row.starts for row in result.rows} == {4, 6, 8, 10}
    write_results(result, samples, tmp_path)
    assert (tmp_path / "acceptance.png").stat().st_size > 5000
    assert (tmp_path / "acceptance.csv").read_text().count("\n") == 1 + len(result.rows)


def test_a_favored_copy_shows() -> None:
    result = evaluate(made(40, 0.005, 0.02, favor=0.02))
    assert result.noise.load_order == pytest.approx(0.02, abs=0.003)
    assert result.false_wins.share > 0.2


def test_samples_survive_the_file(tmp_path: Path) -> None:
    samples = made(3, 0.01, 0.02)
    samples.save(tmp_path / "deep" / "a.jsonl.gz")
    found = Samples.load(tmp_path / "deep" / "a.jsonl.gz")
    assert found.origin == samples.origin
    np.testing.assert_allclose([p.b_us for p in found.pairs], [p.b_us for p in samples.pairs], atol=1e-3)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutSearchError, match="give --model and --plan"):
        Samples.load(tmp_path / "none.gz")
    (tmp_path / "text.gz").write_text("no")
    with pytest.raises(LayoutSearchError, match="does not hold A/A samples"):
        Samples.load(tmp_path / "text.gz")
    made(2, 0.01, 0.02).save(tmp_path / "a.gz")
    (tmp_path / "torn.gz").write_bytes((tmp_path / "a.gz").read_bytes()[:-40])
    with pytest.raises(LayoutSearchError, match="does not hold A/A samples"):
        Samples.load(tmp_path / "torn.gz")


@pytest.mark.slow
def test_pairs_are_measured_and_a_stopped_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aa_samples, "FINAL_STARTS", 2)
    monkeypatch.setattr(aa_samples, "ROUNDS_PER_START", 3)
    module = two_in_three_out()
    (tmp_path / "net.json").write_text(tvm.ir.save_json(module))
    plan = make_plan(module, native_target(), seed=3)
    plan.save(tmp_path / "plan.json")
    model, path, file = str(tmp_path / "net.json"), str(tmp_path / "plan.json"), tmp_path / "samples.jsonl.gz"
    one = measure_pairs(model, path, file, 1, threads=1)
    assert [(len(p.a_us), len(p.b_us), p.per_start) for p in one.pairs] == [(6, 6, 3)]

    arguments = ("--model", model, "--plan", path, "--threads", 1, "--samples", file, "--out", tmp_path, "--json")
    code, out, _ = call(capfd, "bench", "acceptance", "--pairs", 2, *arguments)
    assert code == 0
    assert json.loads(out)["pairs"] == 2
    two = Samples.load(file)
    np.testing.assert_allclose(two.pairs[0].a_us, one.pairs[0].a_us, atol=1e-3)

    again, out_again, _ = call(capfd, "bench", "acceptance", "--samples", file, "--out", tmp_path, "--json")
    assert again == 0
    assert json.loads(out_again) == json.loads(out)

    code, _, err = call(capfd, "bench", "acceptance", "--pairs", 3, *arguments[:4], "--threads", 2, *arguments[6:])
    assert code == 2
    assert "threads 1 (now 2)" in err


def test_it_says_what_it_needs(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capfd, "bench", "acceptance", "--model", "x.onnx")
    assert code == 2
    assert "give --model and --plan" in err
