"""From the sum of the parts to the time of the whole: a correction that is learned from assignments timed whole.

log(measured / additive) is linear in the features of `cost.whole`, each less that of the model's best assignment
(`relative_to_best`), with coefficients that all models share and a deviation of each model's own (a linear mixed model,
Laird and Ware, Biometrics 1982), conditioned in closed form as a Gaussian process (Rasmussen and Williams 2006, chapter
2; the sizes of all parts maximise the marginal likelihood, 5.4). A model never timed gets the shared part with the
spread of what models have of their own; each whole timing of it then pulls the prediction towards its own residuals,
the more the more there are. A few hundred assignments of a handful of models are too few for anything less rigid:
between models there are only as many points as models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from layoutsearch.cost.model import ModelIdentity, ModelMismatch, Prediction
from layoutsearch.cost.whole import WHOLE_FEATURES, WholeShape

SCHEMA = "layoutsearch.correction/2"
_SEVERAL_MODELS = 2
_BOUNDS = (-9.0, 0.5)  # of the logarithms of the standard deviations below


@dataclass(frozen=True)
class WholeRow:
    """An assignment that was timed whole: its shape relative to its model's best, the microseconds, the model."""

    shape: WholeShape
    us: float
    model: str


@dataclass(frozen=True)
class Sizes:
    """Standard deviations, of log(measured / additive).

    Attributes:
        shift: of what all models have in common.
        shared: of each coefficient that all models share.
        own_shift: of what one model has more than that.
        own: of each coefficient's deviation in one model.
        noise: of one assignment.
    """

    shift: float = 0.05
    shared: float = 0.01
    own_shift: float = 0.04
    own: float = 0.01
    noise: float = 0.015


@dataclass(frozen=True)
class _Scaling:
    center: tuple[float, ...]
    width: tuple[float, ...]


class Correction:
    """Predicts whole models from their additive time. An immutable value."""

    def __init__(
        self, rows: Sequence[WholeRow], sizes: Sizes, scaling: _Scaling, identity: ModelIdentity | None = None
    ) -> None:
        self.rows, self.sizes, self._scaling = tuple(rows), sizes, scaling
        self.identity = identity or ModelIdentity()
        self._labels = np.array([r.model for r in self.rows])
        if self.rows:
            self._features = self._scaled([r.shape for r in self.rows])
            self._target = np.array([np.log(r.us / r.shape.additive_us) for r in self.rows])
            covariance = _covariance(self._features, self._features, _same(self._labels, self._labels), sizes)
            self._factor = cho_factor(covariance + np.eye(len(self.rows)) * (sizes.noise**2 + 1e-10))
            self._weights = cho_solve(self._factor, self._target)

    @classmethod
    def fit(cls, rows: Sequence[WholeRow], identity: ModelIdentity | None = None) -> Correction:
        """Learn from whole timings of several models.

        With fewer than two models there is no telling what is a model's own, and the sizes stay at the prior's: a whole
        model within some 5 % of the sum of its parts either way.
        """
        if not rows:
            zeros = (0.0,) * len(WHOLE_FEATURES)
            return cls((), Sizes(), _Scaling(zeros, (1.0,) * len(WHOLE_FEATURES)), identity)
        matrix = np.array([r.shape.features for r in rows])
        width = np.maximum(matrix.std(axis=0), 1e-3)
        scaling = _Scaling(tuple(map(float, matrix.mean(axis=0))), tuple(map(float, width)))
        first = cls(rows, Sizes(), scaling, identity)
        if len(set(first._labels)) < _SEVERAL_MODELS:
            return first
        return cls(rows, first._likeliest(), scaling, identity)

    def updated(self, observations: Sequence[WholeRow]) -> Correction:
        """The correction that also knows these timings, as a rule of the model at hand; the sizes stay as they are."""
        return Correction((*self.rows, *observations), self.sizes, self._scaling, self.identity)

    def predict(self, shapes: Sequence[WholeShape], model: str = "") -> Prediction:
        """Time of assignments of `model`, whole; a model that was never timed may have any name."""
        additive = np.log([s.additive_us for s in shapes])
        if not shapes:
            return Prediction(additive, additive)
        features = self._scaled(shapes)
        own = np.full(len(shapes), model)
        sizes = self.sizes
        prior = np.diag(_covariance(features, features, _same(own, own), sizes)) + sizes.noise**2
        if not self.rows:
            return Prediction(additive, np.sqrt(prior))
        cross = _covariance(features, self._features, _same(own, self._labels), sizes)
        explained = np.einsum("ij,ji->i", cross, cho_solve(self._factor, cross.T))
        return Prediction(additive + cross @ self._weights, np.sqrt(np.maximum(prior - explained, 1e-12)))

    def save(self, path: str | Path) -> None:
        """Write one JSON file: the rows are few, and all there is to it."""
        data = {
            "schema": SCHEMA,
            "features": WHOLE_FEATURES,
            "identity": asdict(self.identity),
            "sizes": asdict(self.sizes),
            "scaling": asdict(self._scaling),
            "rows": [{"model": r.model, "us": r.us, "shape": asdict(r.shape)} for r in self.rows],
        }
        Path(path).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, identity: ModelIdentity | None = None) -> Correction:
        """Read a file that `save` wrote.

        Raises:
            ModelMismatch: other features, another device or templates than `identity`, or no correction at all.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            own = ModelIdentity(**data["identity"])
            if data["schema"] != SCHEMA or tuple(data["features"]) != WHOLE_FEATURES or identity not in (None, own):
                raise ModelMismatch(f"correction {path} has other features or is of another device; fit it again")
            rows = [WholeRow(WholeShape(**r["shape"]), r["us"], r["model"]) for r in data["rows"]]
            scaling = _Scaling(**{name: tuple(values) for name, values in data["scaling"].items()})
            return cls(rows, Sizes(**data["sizes"]), scaling, own)
        except OSError as error:
            raise ModelMismatch(f"correction {path} cannot be read: {error.strerror}; fit it again") from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ModelMismatch(f"{path} is no correction ({type(error).__name__}: {error}); fit it again") from None

    def _scaled(self, shapes: Sequence[WholeShape]) -> np.ndarray:
        center, width = np.array(self._scaling.center), np.array(self._scaling.width)
        # Three widths away a line is a guess, and is not drawn any further.
        return np.clip((np.array([s.features for s in shapes]) - center) / width, -3.0, 3.0)

    def _likeliest(self) -> Sizes:
        same = _same(self._labels, self._labels)
        names = list(asdict(self.sizes))

        def of(logs: np.ndarray) -> Sizes:
            return replace(self.sizes, **dict(zip(names, map(float, np.exp(logs)), strict=True)))

        def loss(logs: np.ndarray) -> float:
            sizes = of(logs)
            covariance = _covariance(self._features, self._features, same, sizes)
            factor = cho_factor(covariance + np.eye(len(self._target)) * (sizes.noise**2 + 1e-10))
            fit = 0.5 * self._target @ cho_solve(factor, self._target) + np.log(np.diag(factor[0])).sum()
            # A weak pull towards the prior, to a factor of three: few models say little of how models differ.
            return float(fit + 0.5 * (((logs - start) / np.log(3.0)) ** 2).sum())

        start = np.log(list(asdict(self.sizes).values()))
        found = minimize(loss, start, method="L-BFGS-B", bounds=[_BOUNDS] * len(names))
        return of(found.x)


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a[:, None] == b[None]).astype(float)


def _covariance(a: np.ndarray, b: np.ndarray, same: np.ndarray, sizes: Sizes) -> np.ndarray:
    product = a @ b.T
    shared = sizes.shift**2 + sizes.shared**2 * product
    return shared + same * (sizes.own_shift**2 + sizes.own**2 * product)
