"""Layout patterns: the language of search-space files, `A->B:K@G`, and that of the command line, `DATA:KERNEL:OUT`."""

from __future__ import annotations

import re

from layoutsearch.layout.candidate import ALGORITHMS, DIRECT, Candidate
from layoutsearch.layout.layout import Layout

OPEN = "default"
"""What leaves a part of a value open, as it does in TVM."""


def as_pattern(value: str) -> str:
    """A value of the command line as `DATA->OUT:KERNEL@ALGORITHM`."""
    layouts, at, algorithm = value.partition("@")
    if "->" in layouts:
        return value
    data, *rest = layouts.split(":")
    kernel, out = ([part if part != OPEN else "" for part in rest] + ["", ""])[:2]
    text = f"{data}->{out}" if out else data
    return text + (f":{kernel}" if kernel else "") + at + algorithm


def sides(pattern: str) -> tuple[str, str]:
    """Data and out layout of a pattern."""
    data, _, out = re.split("[:@]", pattern)[0].partition("->")
    return data, out or data


def admits(pattern: str, candidate: Candidate) -> bool:
    """Whether a candidate is as a pattern says; what that leaves open may be anything."""
    named, _, algorithm = pattern.partition("@")
    layouts, colon, kernel = named.partition(":")
    data, _, out = layouts.partition("->")
    if not (_matches(data, candidate.data) and _matches(out or data, candidate.out)):
        return False
    if not (colon or algorithm):
        return True
    has_kernel = candidate.kernel is None or not colon or _matches(kernel, candidate.kernel)
    return has_kernel and candidate.algorithm == (algorithm or DIRECT)


def _matches(pattern: str, layout: Layout) -> bool:
    return re.fullmatch(re.sub(r"\{[biok]\}", r"\\d+", pattern), layout.name) is not None


def check_value(value: str) -> None:
    """Raise ValueError with what is wrong unless `value`, of the command line, can be read."""
    layouts, _, algorithm = value.partition("@")
    parts = re.split("->|:", layouts)
    if not 1 <= len(parts) <= 3 or layouts.count("->") > 1:
        raise ValueError(f"{value!r} is not DATA, DATA:KERNEL or DATA:KERNEL:OUT")
    for index, part in enumerate(parts):
        if not (index and part == OPEN):
            Layout(re.sub(r"\{[biok]\}", "4", part))
    if algorithm and algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm!r} is not an algorithm; known are {', '.join(ALGORITHMS)}")
