"""Kernels are timed in visits; what disturbed one of them does not count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from layoutsearch.errors import DeviceError
from layoutsearch.measure.kernels import KernelCall
from layoutsearch.measure.results import Measurement, Status
from layoutsearch.search.visits import DISTURBED, Timing, agreed, later, time_in_visits


def ok(*samples: float) -> Measurement:
    return Measurement(Status.OK, samples, "", 0.5)


def failed(status: Status) -> Measurement:
    return Measurement(status, (), status.value, 0.25)


class Timer:
    """Answers each function of each library from a script, one entry a visit; keeps what it was asked."""

    def __init__(self, script: dict[tuple[str, str], list[float | Status]]) -> None:
        self.script, self.asked = script, []  # type: ignore[var-annotated]

    def time_kernels(self, lib_path: str, calls: Sequence[KernelCall], *, repeat: int = 7) -> list[Measurement]:
        found = []
        for call in calls:
            answer = self.script[lib_path, call.function].pop(0)
            self.asked.append((lib_path, call.function, repeat))
            found.append(failed(answer) if isinstance(answer, Status) else ok(*[answer] * repeat))
        return found


def timing(library: str, *functions: str, repeat: int = 7) -> Timing:
    return Timing(library, tuple(KernelCall(name, ()) for name in functions), repeat)


def never() -> bool:
    return False


def test_samples_are_shared_out_between_visits_with_the_batch_in_between() -> None:
    timer = Timer({("a", "f"): [10.0, 11.0], ("b", "f"): [20.0, 20.0], ("b", "g"): [5.0, 5.0]})
    a, b = timing("a", "f"), timing("b", "f", "g")
    time_in_visits(timer, [a, b], never)
    assert timer.asked == [
        ("a", "f", 4), ("b", "f", 4), ("b", "g", 4), ("a", "f", 3), ("b", "f", 3), ("b", "g", 3),
    ]  # fmt: skip
    assert [m.samples_us for m in a.results] == [(10.0,) * 4 + (11.0,) * 3]
    assert [m.median_us for m in b.results] == [20.0, 5.0]


@pytest.mark.parametrize("times", [[30.0, 10.0, 10.5], [10.0, 30.0, 10.5]])
def test_a_disturbed_visit_does_not_count(times: list[float | Status]) -> None:
    timer = Timer({("a", "f"): times, ("a", "g"): [1.0, 1.0]})
    a = timing("a", "f", "g")
    time_in_visits(timer, [a], never)
    assert a.results[0].expected_us == pytest.approx(10.2, abs=0.3)
    assert [function for _, function, _ in timer.asked].count("g") == 2, "only what was disturbed is timed again"
    assert a.results[0].wall_s == pytest.approx(1.5)


def test_what_memory_makes_of_a_kernel_is_kept() -> None:
    assert len(agreed([ok(10.0), ok(10.0 * DISTURBED * 0.99)]).samples_us) == 2
    assert len(agreed([ok(10.0), ok(10.0 * DISTURBED * 1.01)]).samples_us) == 1


@pytest.mark.parametrize("answers", [[Status.CRASH], [10.0, Status.CRASH]])
def test_a_failure_is_the_result_and_not_timed_again(answers: list[float | Status]) -> None:
    timer = Timer({("a", "f"): list(answers), ("a", "g"): [1.0, 1.0]})
    a = timing("a", "f", "g")
    time_in_visits(timer, [a], never)
    assert a.results[0].status is Status.CRASH
    assert a.results[0].error == "crash"
    assert a.results[1].ok
    assert sum(function == "f" for _, function, _ in timer.asked) == len(answers)


def test_a_budget_that_is_over_leaves_what_had_no_visit() -> None:
    timer = Timer({("a", "f"): [10.0], ("b", "f"): [10.0]})
    a, b = timing("a", "f"), timing("b", "f")
    time_in_visits(timer, [a, b], lambda: len(timer.asked) > 0)
    assert len(a.results) == 1
    assert not b.results


def test_few_samples_are_one_visit() -> None:
    timer = Timer({("a", "f"): [10.0]})
    a = timing("a", "f", repeat=1)
    time_in_visits(timer, [a], never)
    assert a.results[0].samples_us == (10.0,)


def test_a_device_that_is_gone_ends_it() -> None:
    with pytest.raises(DeviceError, match="gone"):
        time_in_visits(Timer({("a", "f"): [Status.NO_DEVICE]}), [timing("a", "f")], never)


@pytest.mark.parametrize(
    ("now", "us"),
    [
        # All three visits disturbed, one of them, none, the earlier time, a crash that says nothing.
        ([50.0, 51.0, 50.0], 10.0),
        ([50.0, 10.5, 10.5], 10.5),
        ([10.5, 10.5], 10.5),
        ([2.0, 2.0, 2.0], 2.0),
        ([Status.CRASH], 10.0),
    ],
)
def test_an_earlier_time_says_what_was_disturbed(now: list[float | Status], us: float) -> None:
    a = Timing("a", (KernelCall("f", ()),), 2, earlier=(ok(10.0, 10.0),))
    time_in_visits(Timer({("a", "f"): list(now)}), [a], never)
    assert a.results[0].expected_us == pytest.approx(us)
    # As when the result is read from the records, behind the earlier one.
    assert later(ok(10.0, 10.0), a.results).expected_us == pytest.approx(us)


def test_each_function_has_an_earlier_time_of_its_own() -> None:
    a = Timing("a", (KernelCall("f", ()), KernelCall("g", ())), 2, earlier=(ok(10.0), ok(50.0)))
    time_in_visits(Timer({("a", "f"): [50.0, 50.0, 50.0], ("a", "g"): [50.0, 50.0]}), [a], never)
    assert [m.expected_us for m in a.results] == pytest.approx([10.0, 50.0])


def test_nothing_timed_has_no_result() -> None:
    assert timing("a", "f").results == []
    with pytest.raises(ValueError, match="nothing"):
        agreed([])
