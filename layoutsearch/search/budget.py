"""Time left, and whether the user wants to stop."""

from __future__ import annotations

import re
import threading
import time

from layoutsearch.errors import LayoutSearchError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, option: str = "--time-budget") -> float:
    """Seconds of `90s`, `10m`, `8h`, `1h30m` or a plain number of seconds.

    Raises:
        LayoutSearchError: anything else, or nothing at all.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    units_left_out = len(parts) > 1 and not all(unit for _, unit in parts)
    if not parts or "".join(n + u for n, u in parts) != text.strip() or units_left_out:
        raise LayoutSearchError(f"{option} {text!r} is not a duration; write it like 90s, 10m, 8h or 1h30m")
    seconds = sum(float(n) * _UNITS[u or "s"] for n, u in parts)
    if seconds <= 0:
        raise LayoutSearchError(f"{option} {text!r} leaves no time; give at least 1s")
    return seconds


class Budget:
    """A deadline (or none) and a stop flag; safe to read and set from a signal handler or another thread."""

    def __init__(self, seconds: float | None = None) -> None:
        self.started = time.monotonic()
        self.seconds = seconds
        self._stop = threading.Event()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a deadline."""
        return float("inf") if self.seconds is None else self.seconds - self.elapsed_s

    @property
    def interrupted(self) -> bool:
        """Whether the user asked to stop."""
        return self._stop.is_set()

    def interrupt(self) -> None:
        """Ask to stop after the measurement in flight."""
        self._stop.set()

    def over(self, reserve_s: float = 0.0) -> bool:
        """Whether to stop now, keeping `reserve_s` for what must still be done."""
        return self.interrupted or self.left_s <= reserve_s
