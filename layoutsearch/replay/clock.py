"""Time that passes only when something says so."""

from __future__ import annotations

from layoutsearch.search.budget import Budget


class SimulatedBudget(Budget):
    """A budget of simulated seconds: `spend` is the only thing that makes time pass."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__(seconds)
        self._spent_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Simulated seconds since the start."""
        return self._spent_s

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        if not seconds >= 0:
            raise ValueError(f"{seconds} s cannot pass")
        self._spent_s += seconds
