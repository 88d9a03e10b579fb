"""Boosted trees for log-time over a base, with a calibrated spread: one for kernels, one for transforms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from layoutsearch.cost.conformal import Spread, conformal_sigma, shared_part

FEW_ROWS = 30
_FOLDS = 8
_SEEDS = 5
_PARAMS: dict[str, Any] = {
    "objective": "reg:pseudohubererror",
    "huber_slope": 0.1,
    "eta": 0.06,
    "max_depth": 5,
    "min_child_weight": 2.0,
    "subsample": 0.8,
    "colsample_bynode": 0.4,
    "lambda": 2.0,
    "nthread": 1,
    "verbosity": 0,
    "tree_method": "hist",
}
_ROUNDS = 250
_SCALE_RANGE = (0.5, 2.5)
_SCALE_ROUNDS, _SCALE_DEPTH = 60, 3
_SMALL_ERROR = 0.02


@dataclass(frozen=True)
class Prior:
    """What is assumed where too little was measured: log(time / base) is normal.

    Attributes:
        shift: its mean: minus the logarithm of the typical efficiency against the base.
        sigma: its standard deviation.
        weight: rows that it counts as, against the mean of the rows that there are.
    """

    shift: float
    spread: Spread
    weight: float = 5.0


@dataclass(frozen=True)
class Data:
    """Rows to learn from.

    Attributes:
        features: shape (n, number of features).
        target: log(time / base), shape (n,).
        weights: shape (n,).
        workloads: what shares an error.
        groups: what is left out together to see how far off the model is.
    """

    features: pd.DataFrame
    target: np.ndarray
    weights: np.ndarray
    workloads: tuple[str, ...]
    groups: tuple[str, ...]


class Regressor:
    """log(time / base) from features. Deterministic: one thread, fixed seeds."""

    def __init__(
        self, boosters: Sequence[xgb.Booster], shift: float, scale: xgb.Booster | None, spread: Spread
    ) -> None:
        self._boosters, self._shift, self._scale = tuple(boosters), shift, scale
        self.spread = spread

    @property
    def is_prior(self) -> bool:
        """Whether there were too few rows to learn from, so that the prior answers."""
        return not self._boosters

    @classmethod
    def fit(cls, data: Data, prior: Prior, seed: int = 0) -> Regressor:
        """Learn from rows; with fewer than `FEW_ROWS` the prior, moved towards their mean."""
        n = len(data.target)
        if n < FEW_ROWS:
            shift = (prior.shift * prior.weight + float(data.target.sum())) / (prior.weight + n)
            return cls((), shift, None, prior.spread)
        frame, errors = data.features, _out_of_fold(data, seed)
        scale, scales = _local_scale(data, errors, seed)
        sigma = conformal_sigma(errors, scales, data.groups)
        share = shared_part(errors, data.workloads)
        spread = Spread(float(sigma * share**0.5), float(sigma * (1 - share) ** 0.5))
        boosters = [_train(frame, data.target, data.weights, seed + s) for s in range(_SEEDS)]
        return cls(boosters, 0.0, scale, spread)

    def predict(self, features: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation) of log(time / base), each of shape (n,)."""
        n = len(features)
        if not self._boosters or not n:
            return np.full(n, self._shift), np.full(n, self.spread.total)
        matrix = _matrix(features)
        mean = np.mean([b.predict(matrix) for b in self._boosters], axis=0).astype(float)
        scales = _scales(self._scale.predict(matrix).astype(float)) if self._scale is not None else np.ones(n)
        return mean, scales * self.spread.total

    def to_json(self) -> dict[str, Any]:
        """Plain data, XGBoost's own JSON inside."""
        return {
            "boosters": [_dump(b) for b in self._boosters],
            "shift": self._shift,
            "scale": _dump(self._scale) if self._scale is not None else None,
            "spread": {"between": self.spread.between, "within": self.spread.within},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Regressor:
        """Inverse of `to_json`."""
        scale = _restore(data["scale"]) if data["scale"] is not None else None
        return cls([_restore(b) for b in data["boosters"]], data["shift"], scale, Spread(**data["spread"]))


def _local_scale(data: Data, errors: np.ndarray, seed: int) -> tuple[xgb.Booster | None, np.ndarray]:
    """What predicts the size of `errors` against their usual one, and its answers for rows that it has not seen.

    None and ones where intervals of one width for all rows fit better: that is so with few or noisy rows.
    """
    sizes = np.log(np.abs(errors) + _SMALL_ERROR)
    sizes -= np.median(sizes)
    held = sizes - _out_of_fold(replace(data, target=sizes), seed, _SCALE_ROUNDS, _SCALE_DEPTH)
    scales, even = _scales(held), np.ones(len(errors))
    if _surprise(errors, scales) >= _surprise(errors, even):
        return None, even
    return _train(data.features, sizes, data.weights, seed, _SCALE_ROUNDS, _SCALE_DEPTH), scales


def _surprise(errors: np.ndarray, scales: np.ndarray) -> float:
    """Mean negative log-likelihood of errors under calibrated normal distributions; one outlier counts four sigma."""
    sigma = np.maximum(conformal_sigma(errors, scales), 1e-9) * scales
    return float(np.mean(np.log(sigma) + 0.5 * np.minimum(np.abs(errors) / sigma, 4.0) ** 2))


def _scales(log_scale: np.ndarray) -> np.ndarray:
    """Local spread over the usual one. Half of the logarithm: what predicts the size of errors does it poorly."""
    return np.clip(np.exp(0.5 * log_scale), *_SCALE_RANGE)


def _matrix(features: pd.DataFrame, target: np.ndarray | None = None, weights: np.ndarray | None = None) -> xgb.DMatrix:
    return xgb.DMatrix(
        features.to_numpy(dtype=np.float32),
        label=target,
        weight=weights,
        feature_names=list(features.columns),
        nthread=1,
    )


def _train(
    features: pd.DataFrame,
    target: np.ndarray,
    weights: np.ndarray,
    seed: int,
    rounds: int = _ROUNDS,
    max_depth: int | None = None,
) -> xgb.Booster:
    params = {**_PARAMS, "seed": seed, "base_score": float(np.median(target))}
    if max_depth is not None:
        params["max_depth"] = max_depth
    return xgb.train(params, _matrix(features, target, weights), num_boost_round=rounds)


def _out_of_fold(data: Data, seed: int, rounds: int = _ROUNDS, max_depth: int | None = None) -> np.ndarray:
    """target - prediction of each row by a model that has not seen its group."""
    folds = fold_of(data.groups)
    errors = np.zeros(len(data.target))
    for fold in range(max(folds) + 1):
        held = folds == fold
        if held.all() or not held.any():
            errors[held] = data.target[held] - np.median(data.target)
            continue
        booster = _train(data.features[~held], data.target[~held], data.weights[~held], seed, rounds, max_depth)
        errors[held] = data.target[held] - booster.predict(_matrix(data.features[held]))
    return errors


def fold_of(groups: Sequence[str], folds: int = _FOLDS) -> np.ndarray:
    """Fold number of each row: groups stay together, the largest are dealt out first to the smallest fold."""
    names, counts = np.unique(np.asarray(groups), return_counts=True)
    sizes = [0] * min(folds, len(names))
    number = {}
    for index in np.argsort(-counts, kind="stable"):
        fold = int(np.argmin(sizes))
        number[names[index]] = fold
        sizes[fold] += int(counts[index])
    return np.array([number[g] for g in groups], dtype=int)


def _dump(booster: xgb.Booster) -> Any:
    return json.loads(bytes(booster.save_raw("json")))


def _restore(data: Any) -> xgb.Booster:
    return xgb.Booster(model_file=bytearray(json.dumps(data), "utf-8"))
