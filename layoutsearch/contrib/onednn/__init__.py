"""oneDNN's convolutions: as an algorithm that the search may choose, and as a code generator for external functions.

`pip install 'layoutsearch[onednn]'` brings oneDNN itself (x86-64 Linux).
"""

from __future__ import annotations

from layoutsearch.contrib.onednn.library import link_input, require
from layoutsearch.contrib.onednn.operators import conv_call, lower_kernel, packed_weights, why_not_kernel

__all__ = ["PATTERNS", "conv_call", "link_input", "lower_kernel", "packed_weights", "require", "why_not_kernel"]

PATTERNS = (
    *("NCHW16c", "NCHW8c", "NHWC", "NCHW"),
    # An image as it comes, or with channels last.
    *("NCHW->NCHW16c", "NCHW->NCHW8c", "NHWC->NCHW16c", "NHWC->NCHW8c"),
)
"""What the search proposes; what oneDNN has no fast implementation of drops out convolution by convolution."""
