"""The choices of a model as named parameters: what an Optuna study sees of a layout problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from optuna.distributions import CategoricalDistribution

from layoutsearch.search.skeleton import Skeleton


@dataclass(frozen=True)
class Parameter:
    """A kernel with something to choose.

    Attributes:
        name: of the parameter in the study.
        choices: the text of each candidate, in the order of the kernel's candidates; at least two, all different.
        node: index of the kernel, or the model input, in a solution.
    """

    name: str
    choices: tuple[str, ...]
    node: int


@dataclass(frozen=True)
class AssignmentSpace:
    """The parameters of a layout problem, and the way from a solution to their values and back.

    Attributes:
        parameters: one for each kernel with two candidates or more.
        size: entries of a solution, the kernels without a choice included; theirs are 0.
        about: what else makes the problem another one; enters the digest.
        pinned: kernels whose only candidate a rule has pinned, with the text of it.

    Raises:
        ValueError: two parameters of one name, or two equal choices of a parameter.
    """

    parameters: tuple[Parameter, ...]
    size: int
    pinned: tuple[tuple[str, str], ...] = ()
    about: str = ""

    def __post_init__(self) -> None:
        names = [p.name for p in self.parameters]
        if len(set(names)) != len(names):
            raise ValueError(f"two parameters are called {next(n for n in names if names.count(n) > 1)!r}")
        for parameter in self.parameters:
            if len(set(parameter.choices)) != len(parameter.choices):
                raise ValueError(f"{parameter.name} has two equal choices: {parameter.choices}")

    @classmethod
    def of(
        cls,
        skeleton: Skeleton,
        names: Mapping[str, str] | None = None,
        pinned: Collection[str] = (),
        about: str = "",
    ) -> AssignmentSpace:
        """The parameters of a model, called as `names` calls their root operators (by variable), else as the root.

        `pinned` are the roots that a rule may have left one candidate.
        """
        found, only = [], []
        for index, node in enumerate(skeleton.nodes):
            name = (names or {}).get(node.root, node.root)
            if len(node.choices) > 1:
                found.append(Parameter(name, tuple(str(choice) for choice in node.choices), index))
            elif node.root in pinned:
                only.append((name, str(node.choices[0])))
        for index, given in enumerate(skeleton.inputs, len(skeleton.nodes)):
            found.append(Parameter(f"input {given.name}", tuple(map(str, given.layouts)), index))
        return cls(tuple(found), skeleton.size, tuple(only), about)

    @cached_property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        """Parameter name -> its distribution."""
        return {p.name: CategoricalDistribution(p.choices) for p in self.parameters}

    @cached_property
    def digest(self) -> str:
        """Changes with any name, choice or order: Optuna lets none of them change within a study; and with any pin."""
        rest = [*([list(self.pinned)] if self.pinned else []), *([self.about] if self.about else [])]
        text = json.dumps([*([p.name, p.choices, p.node] for p in self.parameters), self.size, *rest])
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]

    def params(self, solution: Sequence[int]) -> dict[str, str]:
        """Parameter values of a solution.

        Raises:
            ValueError: not one valid candidate index per kernel.
        """
        if len(solution) != self.size:
            raise ValueError(f"the solution has {len(solution)} entries, expected {self.size}, one per kernel")
        found = {}
        for parameter in self.parameters:
            index = int(solution[parameter.node])
            if not 0 <= index < len(parameter.choices):
                raise ValueError(f"{parameter.name} has no choice {index}; it has {len(parameter.choices)}")
            found[parameter.name] = parameter.choices[index]
        return found

    def solution(self, params: Mapping[str, object]) -> tuple[int, ...]:
        """Inverse of `params`; further parameters are ignored.

        Raises:
            ValueError: a parameter is missing, or has a value that is none of its choices.
        """
        found = [0] * self.size
        for parameter in self.parameters:
            value = params.get(parameter.name)
            if value not in parameter.choices:
                raise ValueError(f"{parameter.name} is {value!r}; expected one of {', '.join(parameter.choices)}")
            found[parameter.node] = parameter.choices.index(str(value))
        return tuple(found)
