"""What a run knows of all costs at its end: measured ones, and for the rest what it believes of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from layoutsearch.cost.posterior import Evidence, Posterior
from layoutsearch.layout.candidate import choice_text
from layoutsearch.layout.kinds import Role
from layoutsearch.plan.apply import target_json, tensor_id
from layoutsearch.search.beliefs import Beliefs
from layoutsearch.search.export import PlanContext
from layoutsearch.search.known import Known, Lab
from layoutsearch.search.plan_costs import (
    EARLY,
    INPUT,
    MEASURED,
    PREDICTED,
    Cost,
    CostNode,
    CostOp,
    CostTensor,
    PlanCosts,
)
from layoutsearch.search.skeleton import Skeleton, SkeletonInput, SkeletonTensor

# Of the interval in which a predicted time lies at 80 %, and how many draws of all times it is read from.
_LOW, _HIGH = 0.1, 0.9
_DRAWS = 200


def final_costs(context: PlanContext, skeleton: Skeleton, lab: Lab, beliefs: Beliefs) -> PlanCosts:
    """Costs of every candidate and transform of a model, in the terms of its plan."""
    beliefs.update()
    index = beliefs.index
    kernels = _costs([lab.of(w, c) for w, c in index.pairs], beliefs.kernels, beliefs.kernel_evidence)
    moves = _costs([lab.transform(key) for key in index.transforms], beliefs.transforms, beliefs.transform_evidence)
    by_pair = {(w.key, c): cost for (w, c), cost in zip(index.pairs, kernels, strict=True)}
    by_key = dict(zip(index.transforms, moves, strict=True))
    ops = {op.name: CostOp(op.id, op.name, op.op, op.kind, op.role) for op in context.graph.ops}
    ids = {op.name: op.id for op in context.graph.ops}
    moves_of: dict[int, dict[tuple[int, int], Cost]] = {}
    for (t, source, target), key in skeleton.keys.items():
        moves_of.setdefault(t, {})[source, target] = by_key[key]
    device = context.device
    return PlanCosts(
        fingerprint=context.fingerprint,
        target=target_json(context.target),
        device={"key": device.key, "cpu": device.cpu, "threads": device.threads},
        predicted_by=beliefs.predicted_by,
        nodes=tuple(
            CostNode(
                tuple(ops[name] for name in node.members),
                tuple(choice_text(choice) for choice in node.choices),
                tuple(by_pair[node.workload.key, choice] for choice in node.choices),
            )
            for node in skeleton.nodes
        )
        + tuple(_input(context, given) for given in skeleton.inputs),
        tensors=tuple(_tensor(tensor, moves_of.get(t, {}), ids) for t, tensor in enumerate(skeleton.tensors)),
    )


def _input(context: PlanContext, given: SkeletonInput) -> CostNode:
    """An input whose layout is a choice of its own."""
    names = dict(zip((t.name for t in context.graph.inputs), (i.name for i in context.loaded.inputs), strict=True))
    name = f"{INPUT} {names[given.name]}"
    op = CostOp(name, name, INPUT, INPUT, Role.FROZEN)
    return CostNode((op,), tuple(map(str, given.layouts)), (Cost(0.0, MEASURED),) * len(given.layouts))


def _costs(known: list[Known], posterior: Posterior, evidence: Evidence) -> list[Cost]:
    mean = posterior.mean()
    draws = np.where(evidence.dead, 0.0, posterior.draw(np.random.default_rng(0), _DRAWS))
    low, high = np.quantile(draws, [_LOW, _HIGH], axis=0)
    found = []
    for k, entry in enumerate(known):
        if evidence.seen[k] or evidence.dead[k]:
            found.append(Cost(entry.best_us, MEASURED if evidence.over[k] else EARLY))
        else:
            found.append(Cost(float(mean[k]), PREDICTED, (float(low[k]), float(high[k]))))
    return found


def _tensor(tensor: SkeletonTensor, moves: Mapping[tuple[int, int], Cost], ids: Mapping[str, str]) -> CostTensor:
    return CostTensor(
        id=tensor_id(tensor.info.name, ids),
        layouts=tuple(str(layout) for layout in tensor.layouts),
        producer=tensor.producer,
        made=tensor.made,
        uses=tuple((use.node, use.wanted) for use in tensor.uses),
        moves=moves,
    )
