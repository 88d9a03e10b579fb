"""Where the model starts from: a roofline-like time out of a candidate's tile, its bytes and the machine's peaks.

The learned part is the logarithm of what was measured over this base. Sizes that no training model had then only move
the base, which knows how time grows with them; trees, which are constant outside what they have seen, do not have to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layoutsearch.cost.loops import Loops, loops_of
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.tiles import Tile, best_tile, matmul_tile
from layoutsearch.cost.touched import extra_weight_bytes
from layoutsearch.cost.walk import SMALL, transform_walk
from layoutsearch.layout.candidate import Candidate
from layoutsearch.layout.facts import KernelFacts
from layoutsearch.layout.transform import TransformKey

# Operations below which a contraction stays on one thread, and what a serial kernel costs by being called.
_SERIAL_FLOPS = 50_000
_SERIAL_US = 0.05
_GATHER_CYCLES = 0.5  # by element
_US = 1e3  # nanoseconds


@dataclass(frozen=True)
class KernelBase:
    """The parts of a kernel's base, in microseconds.

    Attributes:
        peak_us: its operations at the machine's peak.
        compute_us: the inner loops of its most likely tile.
        weights_us: its weights from where the model finds them.
        activations_us: its other operands and results, from the cache that holds them.
        call_us: waking the threads.
        tile: of a contraction; None otherwise.
        loops: of anything else.
    """

    peak_us: float
    compute_us: float
    weights_us: float
    activations_us: float
    call_us: float
    tile: Tile | None
    loops: Loops | None

    @property
    def us(self) -> float:
        """The base: what overlaps in part is added up."""
        return self.compute_us + self.weights_us + self.activations_us + self.call_us


def kernel_base(facts: KernelFacts, choice: Candidate | None, machine: Machine) -> KernelBase:
    """The base of a kernel under a candidate; None is the kernel in its original layouts."""
    moved = facts.read_bytes + facts.written_bytes
    tile = _tile(facts, choice, machine)
    loops = None if tile is not None else loops_of(facts, choice, machine)
    elements = sum(math.prod(o.shape) for o in facts.results)
    parallel = machine.threads > 1 and (facts.flops > _SERIAL_FLOPS if tile else elements > SMALL)
    alone = 1 if parallel else machine.threads
    if loops is None:
        assert tile is not None
        compute = tile.cycles / machine.ghz / _US * alone
    else:
        compute = loops.cycles / machine.ghz / _US / machine.threads * alone
    return KernelBase(
        peak_us=facts.flops / machine.gflops / _US,
        compute_us=compute,
        weights_us=(facts.weight_bytes + extra_weight_bytes(facts, choice))
        / machine.weights_gb_s(facts.footprint)
        / _US,
        activations_us=moved / machine.gb_s(moved) / _US * alone,
        call_us=machine.call_us if parallel else _SERIAL_US,
        tile=tile,
        loops=loops,
    )


def _tile(facts: KernelFacts, choice: Candidate | None, machine: Machine) -> Tile | None:
    if facts.conv is not None:
        if choice is None:
            choice = Candidate.of("NCHW", "OIHW")
        return best_tile(facts.conv, facts.kind.startswith("conv2d_transpose"), choice, machine)
    if facts.kind == "matmul" and facts.results and facts.operands:
        depth, made = facts.operands[0].shape[-1], facts.results[0].shape
        if depth and made:
            rows = made[-2] if len(made) > 1 else 1
            return matmul_tile(math.prod(made[:-2]), rows, made[-1], depth, machine)
    return None


def transform_base(key: TransformKey, machine: Machine) -> float:
    """The base of a layout change, in microseconds: its bytes both ways, the turning in registers, the call."""
    walk = transform_walk(key, machine.lanes)
    elements = math.prod(key.shape)
    alone = 1 if walk.parallel else machine.threads
    if walk.turns:
        # Each row of a tile is loaded, exchanged log2(tile) times and stored; without a tile, elements are gathered.
        row = (2.0 + 2.0 * math.log2(walk.tile)) / walk.tile if walk.tile > 1 else _GATHER_CYCLES
        cycles = elements / (walk.rows_full * walk.columns_full) * row
    else:
        cycles = 2.0 * elements / min(machine.lanes, max(1, walk.shared_run)) / walk.columns_full
    compute = cycles / machine.ghz / _US / machine.threads * alone
    moved = 2 * key.bytes
    call = machine.call_us if walk.parallel and machine.threads > 1 else _SERIAL_US
    return compute + moved / machine.gb_s(moved) / _US * alone + call
