"""The canonical module: what every later step refers to.

One `main` in dataflow form and A-normal form, in the model's own layouts, made of ops that layouts can pass through.
See `layoutsearch.model.passes` for the rewrites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm

from layoutsearch.model.passes import arithmetic, clip, conv, identity, normalization, pool, raise_tir
from layoutsearch.model.passes.fold import fold_constant
from layoutsearch.model.passes.rewriter import Rule, apply_rules
from layoutsearch.model.passes.structure import clean, main_function, rename, to_dataflow

_MAX_WALKS = 200


def _collect(*tables: Mapping[str, Sequence[Rule]]) -> dict[str, list[Rule]]:
    rules: dict[str, list[Rule]] = {"*": [fold_constant]}
    for table in tables:
        for name, some in table.items():
            rules.setdefault(name, []).extend(some)
    return rules


_RULES = _collect(identity.RULES, raise_tir.RULES, clip.RULES, conv.RULES, arithmetic.RULES, pool.RULES)


def canonicalize(module: tvm.IRModule) -> tvm.IRModule:
    """Bring an imported module into canonical form.

    The result computes what the module computes, up to the rounding of reassociated constants (a folded batch
    normalisation, a reciprocal). Canonicalizing again changes nothing.

    Args:
        module: a Relax module with a function `main`; it is not changed.

    Returns:
        A new module whose `main` has the same parameters and outputs, in one dataflow block where no call is impure,
        every operand a variable or a constant, every bound variable with a unique name.

    Raises:
        ModelError: the module has no Relax function `main`.
    """
    main_function(module)
    module = to_dataflow(module)
    for _ in range(_MAX_WALKS):
        module, changed = apply_rules(module, _RULES, normalization.ITEM_RULES)
        if not changed:
            return rename(module)
        module = clean(module)
    raise AssertionError("the rewrite rules of canonicalize do not settle on this module")
