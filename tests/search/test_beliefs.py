"""What a search believes of candidates that are alike."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from layoutsearch.search.beliefs import _labels
from tests.cost.rows import CHOICES, MACHINE, conv


def test_what_leaves_the_caches_tells_nothing_of_what_stays() -> None:
    facts = [conv(64, 64, 14), conv(64, 64, 28), conv(64, 64, 560), conv(64, 64, 1120)]
    large = [f.read_bytes + f.written_bytes > MACHINE.l2_bytes * MACHINE.threads for f in facts]
    assert large == [False, False, True, True]
    pairs = [(SimpleNamespace(facts=f), CHOICES[0]) for f in facts]
    kinds, _, families = _labels(SimpleNamespace(pairs=pairs, groups=np.arange(4)), MACHINE)  # type: ignore[arg-type]
    for labels in (kinds, families):
        assert labels[0] == labels[1]
        assert labels[2] == labels[3]
        assert labels[0] != labels[2]
