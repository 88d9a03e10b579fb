"""Synthetic kernels and times: facts made by hand, times by a simple law that a model must be able to find."""

from __future__ import annotations

import math

import numpy as np

from layoutsearch.cost.base import kernel_base, transform_base
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.rows import KernelRow, TransformRow
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import ConvFacts, KernelFacts, OperandFacts
from layoutsearch.layout.layout import Layout
from layoutsearch.layout.transform import TransformKey
from layoutsearch.schedule.target import TargetInfo

TARGET = TargetInfo("avx512", 16, 32, True, 32 << 10, 1 << 20, 2)
MACHINE = Machine.nominal(TARGET)
CHOICES = (
    Candidate.of("NCHW", "OIHW"),
    Candidate.of("NHWC", "HWIO"),
    Candidate.of("NCHW8c", "OIHW8i8o"),
    Candidate.of("NCHW16c", "OIHW16i16o"),
    Candidate.of("NCHW8c", "OIHW8i16o", "NCHW16c"),
)


def conv(channels: int, out: int, size: int, kernel: int = 3, stride: int = 1, relu: bool = True) -> KernelFacts:
    """A dense convolution with a bias, and an activation."""
    made = -(-size // stride)
    kind = "conv2d_pointwise" if kernel == 1 and stride == 1 else "conv2d"
    flops = 2 * out * made * made * channels * kernel * kernel + out * made * made * (2 if relu else 1)
    return KernelFacts(
        kind,
        ("add", "relu") if relu else ("add",),
        (
            OperandFacts((1, channels, size, size), "NCHW", "float32"),
            OperandFacts((out, channels, kernel, kernel), "OIHW", "float32", True),
            OperandFacts((1, out, 1, 1), "NCHW", "float32", True),
        ),
        (OperandFacts((1, out, made, made), "NCHW", "float32"),),
        ConvFacts(1, channels, out, (kernel, kernel), (stride, stride), (1, 1), 1, (size, size), (made, made)),
        (1, 1),
        flops,
    )


def true_us(facts: KernelFacts, choice: Candidate | None) -> float:
    """A law that is not the base: channels last are slow, large kernels fast, small blocks waste half."""
    factor = 1.0
    if choice is not None:
        factor *= 1.6 if choice.data.name == "NHWC" else 1.0
        factor *= 1.9 if choice.out.block("C") == 8 else 1.0
    if facts.conv is not None and facts.conv.kernel == (3, 3):
        factor *= 0.7
    return kernel_base(facts, choice, MACHINE).us * factor


def kernel_rows(model: str, seed: int, workloads: int = 12, noise: float = 0.03) -> list[KernelRow]:
    """Rows of a made-up model."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(workloads):
        channels, out = (int(2 ** rng.integers(4, 9)) for _ in range(2))
        facts = conv(channels, out, int(rng.choice([7, 14, 28, 56])), int(rng.choice([1, 3])), relu=bool(index % 2))
        for choice in CHOICES:
            us = true_us(facts, choice) * math.exp(noise * rng.standard_normal())
            rows.append(KernelRow(facts, choice, us, f"{model}-{index}", model))
    return rows


def transform_rows(model: str, seed: int, tensors: int = 12, noise: float = 0.03) -> list[TransformRow]:
    """Layout changes of a made-up model: to NHWC is dear."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(tensors):
        shape = (1, int(16 * rng.integers(1, 17)), *(int(rng.choice([7, 14, 28, 56])),) * 2)
        for source, target in (("NCHW", "NHWC"), ("NCHW16c", "NCHW"), ("NHWC", "NCHW16c")):
            key = TransformKey(shape, "NCHW", "float32", Layout(source), Layout(target))
            us = transform_base(key, MACHINE) * (2.0 if target == "NHWC" else 0.8)
            rows.append(TransformRow(key, us * math.exp(noise * rng.standard_normal()), model))
    return rows
