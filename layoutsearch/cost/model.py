"""The learned cost model: log-time of kernels and of transforms, with a spread that holds.

What is learned is log(time / base), see `cost.base`. It is fitted in a few seconds from what was measured so far and
saved as one JSON file; a file of another feature schema, device or set of templates is refused, never read wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from layoutsearch.cost.base import kernel_base, transform_base
from layoutsearch.cost.conformal import Spread
from layoutsearch.cost.features import (
    KERNEL_FEATURES,
    SCHEMA_VERSION,
    TRANSFORM_FEATURES,
    Kernel,
    kernel_features,
    transform_features,
)
from layoutsearch.cost.machine import Machine
from layoutsearch.cost.regress import Data, Prior, Regressor
from layoutsearch.cost.rows import KernelRow, TransformRow
from layoutsearch.cost.views import is_view
from layoutsearch.errors import LayoutSearchError
from layoutsearch.layout.transform import TransformKey
from layoutsearch.measure.results import VIEW_US
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.targets import as_target, default_threads

if TYPE_CHECKING:
    from layoutsearch.measure.profile import DeviceProfile
    from layoutsearch.measure.records import RecordContext

SCHEMA = "layoutsearch.cost/1"

# The prior, used below 30 rows: kernels take the base itself (whose nominal figures are those of a common core), to a
# factor of two either way; transforms, whose inner loops vary more, to a factor of three.
KERNEL_PRIOR = Prior(0.0, Spread(0.5, 0.5))
TRANSFORM_PRIOR = Prior(0.0, Spread(0.6, 0.9))
_VIEW_SIGMA = 0.01


class ModelMismatch(LayoutSearchError):
    """A saved model does not belong here: other features, another device, other templates. Fit it again."""


@dataclass(frozen=True)
class Prediction:
    """Predicted times.

    Attributes:
        log_us: natural logarithm of microseconds, shape (n,).
        sigma: standard deviation of `log_us`, shape (n,).
    """

    log_us: np.ndarray
    sigma: np.ndarray

    @property
    def us(self) -> np.ndarray:
        """Median microseconds, shape (n,)."""
        return np.exp(self.log_us)

    def interval(self, coverage: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest microseconds at a coverage; at 80 % this is the conformal interval itself."""
        z = NormalDist().inv_cdf(0.5 + coverage / 2)
        return np.exp(self.log_us - z * self.sigma), np.exp(self.log_us + z * self.sigma)


@dataclass(frozen=True)
class ModelIdentity:
    """What a fitted model is good for.

    Attributes:
        device: CPU, threads and target.
        templates: versions of the schedule templates and of TVM.
    """

    device: str = ""
    templates: str = ""

    @classmethod
    def of(cls, context: RecordContext) -> ModelIdentity:
        """That of measurements in a context. The device's key is a name only and does not count."""
        return cls(
            f"{context.cpu}, {context.threads} threads, {context.target}", f"{context.template}, tvm {context.tvm}"
        )


class CostModel:
    """Predicts log-times of kernels under candidates and of layout changes."""

    def __init__(
        self,
        machine: Machine,
        identity: ModelIdentity,
        kernels: Regressor,
        transforms: Regressor,
        rows: tuple[int, int],
    ) -> None:
        self.machine, self.identity, self.rows = machine, identity, rows
        self._kernels, self._transforms = kernels, transforms

    @classmethod
    def fit(
        cls,
        kernel_rows: Sequence[KernelRow],
        transform_rows: Sequence[TransformRow],
        profile: DeviceProfile | None = None,
        *,
        target: TargetInfo | None = None,
        identity: ModelIdentity | None = None,
        seed: int = 0,
    ) -> CostModel:
        """Fit to measurements.

        Args:
            kernel_rows: best time of each candidate that was measured.
            transform_rows: the same of layout changes.
            profile: calibrated peaks of the device; nominal ones without.
            target: vectors and caches; by default those of the profile's target, or of this machine's CPU.
            identity: what to refuse the saved file for; see `load`.
            seed: of the subsampling.
        """
        if target is None:
            target = _target(profile)
        machine = Machine.of(profile, target)
        # What costs nothing teaches nothing about what does.
        kernel_rows = [row for row in kernel_rows if not is_view(row.facts, row.choice)]
        transform_rows = [row for row in transform_rows if not row.key.keeps_order]
        kernels = Regressor.fit(_kernel_data(kernel_rows, machine), KERNEL_PRIOR, seed)
        transforms = Regressor.fit(_transform_data(transform_rows, machine), TRANSFORM_PRIOR, seed)
        return cls(machine, identity or ModelIdentity(), kernels, transforms, (len(kernel_rows), len(transform_rows)))

    @property
    def spread(self) -> Spread:
        """Of kernels: the part of the error that all candidates of a workload share, and the rest."""
        return self._kernels.spread

    @property
    def transform_spread(self) -> Spread:
        """Of transforms; `between` is what the transforms of one tensor share."""
        return self._transforms.spread

    @property
    def is_prior(self) -> tuple[bool, bool]:
        """Whether kernels, transforms are predicted by the prior alone, for want of rows."""
        return self._kernels.is_prior, self._transforms.is_prior

    def kernels(self, kernels: Sequence[Kernel]) -> Prediction:
        """Times of kernels, each under a candidate or None for a frozen one."""
        base = np.log([kernel_base(facts, choice, self.machine).us for facts, choice in kernels])
        mean, sigma = self._kernels.predict(kernel_features(kernels, self.machine))
        views = np.array([is_view(facts, choice) for facts, choice in kernels], dtype=bool)
        return Prediction(np.where(views, math.log(VIEW_US), base + mean), np.where(views, _VIEW_SIGMA, sigma))

    def transforms(self, keys: Sequence[TransformKey]) -> Prediction:
        """Times of layout changes that stand alone."""
        base = np.log([transform_base(key, self.machine) for key in keys])
        mean, sigma = self._transforms.predict(transform_features(keys, self.machine))
        views = np.array([key.keeps_order for key in keys], dtype=bool)
        return Prediction(np.where(views, math.log(VIEW_US), base + mean), np.where(views, _VIEW_SIGMA, sigma))

    def save(self, path: str | Path) -> None:
        """Write one JSON file."""
        data = {
            "schema": SCHEMA,
            "features": {"version": SCHEMA_VERSION, "kernels": KERNEL_FEATURES, "transforms": TRANSFORM_FEATURES},
            "identity": asdict(self.identity),
            "machine": asdict(self.machine),
            "rows": self.rows,
            "kernels": self._kernels.to_json(),
            "transforms": self._transforms.to_json(),
        }
        Path(path).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, identity: ModelIdentity | None = None) -> CostModel:
        """Read a file that `save` wrote.

        Args:
            path: the file.
            identity: device and templates that it must be of; None takes any.

        Raises:
            ModelMismatch: it is of another feature schema, device or templates, or is no cost model.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            _check(data, path, identity)
            return cls(
                Machine(**data["machine"]),
                ModelIdentity(**data["identity"]),
                Regressor.from_json(data["kernels"]),
                Regressor.from_json(data["transforms"]),
                (data["rows"][0], data["rows"][1]),
            )
        except OSError as error:
            raise ModelMismatch(f"cost model {path} cannot be read: {error.strerror}; fit it again") from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ModelMismatch(f"{path} is not a cost model ({type(error).__name__}: {error}); fit it again") from None


def _target(profile: DeviceProfile | None) -> TargetInfo:
    if profile is None:
        return TargetInfo.from_target(as_target(None), default_threads())
    return TargetInfo.from_target(as_target(json.loads(profile.target) if profile.target else None), profile.threads)


def _check(data: Mapping[str, Any], path: str | Path, identity: ModelIdentity | None) -> None:
    features = data["features"]
    found = [
        ("schema", data["schema"], SCHEMA),
        ("feature schema", features["version"], SCHEMA_VERSION),
        ("kernel features", tuple(features["kernels"]), KERNEL_FEATURES),
        ("transform features", tuple(features["transforms"]), TRANSFORM_FEATURES),
    ]
    if identity is not None:
        found.append(("device", data["identity"]["device"], identity.device))
        found.append(("templates", data["identity"]["templates"], identity.templates))
    for what, have, want in found:
        if have != want:
            shown = "" if isinstance(want, tuple) else f" {have!r}, expected {want!r}"
            raise ModelMismatch(f"cost model {path} is of other {what}{shown}; fit it again")


def _kernel_data(rows: Sequence[KernelRow], machine: Machine) -> Data:
    kernels = [(r.facts, r.choice) for r in rows]
    base = np.array([kernel_base(facts, choice, machine).us for facts, choice in kernels])
    target = np.log(np.array([r.us for r in rows]) / base)
    workloads = tuple(r.workload for r in rows)
    weights = np.array([_trust(r) for r in rows])
    return Data(
        kernel_features(kernels, machine), target, weights, workloads, _groups([r.model for r in rows], workloads)
    )


def _trust(row: KernelRow) -> float:
    """Weight of a row: after few tries a convolution's best schedule is probably not among them."""
    if row.facts.conv is None:
        return 1.0
    return math.sqrt(min(1.0, max(row.tries, 1) / _ENOUGH_TRIES))


def _transform_data(rows: Sequence[TransformRow], machine: Machine) -> Data:
    keys = [r.key for r in rows]
    base = np.array([transform_base(key, machine) for key in keys])
    target = np.log(np.array([r.us for r in rows]) / base)
    workloads = tuple(key.workload for key in keys)
    return Data(
        transform_features(keys, machine),
        target,
        np.ones(len(rows)),
        workloads,
        _groups([r.model for r in rows], workloads),
    )


_SEVERAL_MODELS = 2
_ENOUGH_TRIES = 8


def _groups(models: Sequence[str], workloads: Sequence[str]) -> tuple[str, ...]:
    """What to leave out together: whole models where there are several, else workloads.

    Another model is further off than another workload of the same models: intervals calibrated on the latter hold 60 %
    of the time where 80 % were promised (seen with two or three of six models to learn from).
    """
    return tuple(models) if len(set(models)) >= _SEVERAL_MODELS else tuple(workloads)
