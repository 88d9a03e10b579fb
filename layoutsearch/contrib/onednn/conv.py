"""A convolution as oneDNN is told of it: a line of text that the runtime reads."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from layoutsearch.contrib.onednn.library import Chosen, Unsupported, choose
from layoutsearch.layout.layout import Layout
from layoutsearch.schedule.compute.conv import conv2d_out_extent

TAGS = {"NCHW": "abcd", "NHWC": "acdb", "NCHW8c": "aBcd8b", "NCHW16c": "aBcd16b"}
"""Layouts of data and result, with oneDNN's names for them."""


_TAG, _BLOCK = re.compile(r"([A-Za-z]+)((?:\d+[a-z])*)"), re.compile(r"(\d+)([a-z])")


@dataclass(frozen=True)
class Conv:
    """conv2d with what is fused behind it, float32.

    Attributes:
        data: logical (N, C, H, W) of what is read.
        kernel: logical (O, I / groups, H, W) of the weights.
        strides, padding, dilation: (y, x), (top, left, bottom, right), (y, x).
        groups: as conv2d's.
        data_layout, out_layout: keys of `TAGS`.
        bias: whether a bias is the third operand.
        post: what is applied to the result, in the runtime's words, in order.
        weights: oneDNN's name for the layout of the weights; `any` until it is known.
        given: that of the weights which are passed, where they have to be packed in every call; else empty.
    """

    data: tuple[int, int, int, int]
    kernel: tuple[int, int, int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    data_layout: str
    out_layout: str
    bias: bool = False
    post: tuple[str, ...] = ()
    weights: str = "any"
    given: str = ""

    @classmethod
    def of(cls, attrs: Any, data_shape: list[int], kernel: tuple[int, ...]) -> Conv:
        """From conv2d's attributes, the shape of the data in memory and the logical shape of the weights."""
        layout = str(attrs.data_layout)
        return cls(
            data=tuple(Layout(layout).logical_shape(data_shape, "NCHW")),  # type: ignore[arg-type]
            kernel=tuple(kernel),  # type: ignore[arg-type]
            strides=tuple(int(s) for s in attrs.strides),  # type: ignore[arg-type]
            padding=tuple(int(p) for p in attrs.padding),  # type: ignore[arg-type]
            dilation=tuple(int(d) for d in attrs.dilation),  # type: ignore[arg-type]
            groups=int(attrs.groups),
            data_layout=layout,
            out_layout=str(attrs.out_layout or layout),
        )

    @property
    def out(self) -> tuple[int, int, int, int]:
        """Logical (N, C, H, W) of the result."""
        (n, _, h, w), (o, _, kh, kw) = self.data, self.kernel
        top, left, bottom, right = self.padding
        oh = conv2d_out_extent(h, kh, self.strides[0], top + bottom, self.dilation[0])
        ow = conv2d_out_extent(w, kw, self.strides[1], left + right, self.dilation[1])
        return n, o, oh, ow

    @property
    def text(self) -> str:
        """What the runtime reads; see `parse` in runtime.c."""
        (n, c, h, w), (_, o, oh, ow), (_, _, kh, kw) = self.data, self.out, self.kernel
        sizes = (n, c, h, w, o, oh, ow, kh, kw, *self.strides, *self.padding, *self.dilation, self.groups)
        weights = f"{self.weights}<{self.given}" if self.given else self.weights
        words = (TAGS[self.data_layout], weights, TAGS[self.out_layout], str(int(self.bias)), *self.post)
        return " ".join([*map(str, sizes), *words])

    @property
    def chosen(self) -> Chosen:
        """What oneDNN makes of it; raises ToolchainError."""
        return choose(self.text)

    def packed(self) -> Conv:
        """The same with the layout of the weights that oneDNN likes best, whatever is fused behind it."""
        return replace(self, weights=replace(self, bias=False, post=(), weights="any", given="").chosen.weights)


_DEPTHWISE = {"OIHW": "abcde", "OIHW8o": "Abcde8a", "OIHW16o": "Abcde16a", "HWIO8o": "decbA8a", "HWIO16o": "decbA16a"}


def tag_of_kernel(layout: str, conv: Conv) -> str | None:
    """oneDNN's name for weights in one of TVM's layouts; None where they do not have the same memory."""
    if conv.groups > 1:
        depthwise = conv.groups == conv.data[1] == conv.out[1]
        return _DEPTHWISE.get(layout) if depthwise else "abcde" if layout == "OIHW" else None
    letters, axes = dict(zip("OIHW", "abcd", strict=True)), Layout(layout).axes
    blocked = Layout(layout).blocks
    outer = [letters[a.letter] for a in axes if not a.is_inner]
    outer = [c.upper() if a in blocked else c for a, c in zip(Layout(layout).primal, outer, strict=True)]
    return "".join([*outer, *(f"{a.factor}{letters[a.letter.upper()]}" for a in axes if a.is_inner)])


def kernel_of_tag(tag: str, conv: Conv) -> str | None:
    """Inverse of `tag_of_kernel`; None for what TVM has no layout for, or where oneDNN fills up blocks."""
    if conv.groups > 1:
        found = next((name for name, known in _DEPTHWISE.items() if known == tag), None)
    else:
        names = dict(zip("abcd", "OIHW", strict=True))
        outer, inner = _TAG.fullmatch(tag).groups()  # type: ignore[union-attr]
        found = "".join(names[c.lower()] for c in outer)
        found += "".join(f"{size}{names[c].lower()}" for size, c in _BLOCK.findall(inner))
        if len({c for _, c in _BLOCK.findall(inner)}) < len(_BLOCK.findall(inner)):
            return None
    if found is None or tag_of_kernel(found, conv) != tag or not Layout(found).divides(conv.kernel, "OIHW"):
        return None
    return found


def why_not(conv: Conv) -> str | None:
    """Why oneDNN does not compute `conv`, or not fast; None where it does."""
    for layout, channels in ((conv.data_layout, conv.data[1]), (conv.out_layout, conv.out[1])):
        if layout not in TAGS:
            return f"oneDNN does not know layout {layout}; it has {', '.join(TAGS)}"
        block = Layout(layout).block("C")
        if channels % block or (conv.groups > 1 and conv.groups != channels and channels // conv.groups % block):
            return f"block {block} does not divide the {channels} channels in {conv.groups} groups"
    try:
        how = conv.packed().chosen
    except Unsupported as reason:
        return str(reason)
    return f"oneDNN has no fast implementation of it ({how.how})" if how.is_reference else None
