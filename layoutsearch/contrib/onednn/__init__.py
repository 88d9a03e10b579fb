"""oneDNN's convolutions: as an algorithm that the search may choose, and as a code generator for external functions.

`pip install 'layoutsearch[onednn]'` brings oneDNN itself (x86-64 Linux).
"""

from __future__ import annotations

from layoutsearch.contrib.onednn.library import link_input
from layoutsearch.contrib.onednn.operators import conv_call, lower_kernel, packed_weights, why_not_kernel

__all__ = ["conv_call", "link_input", "lower_kernel", "packed_weights", "why_not_kernel"]
