"""What is learned from one run to the next: the cost model and the correction, from all models of this device."""

from __future__ import annotations

from collections.abc import Sequence

from layoutsearch.cost.correction import Correction, WholeRow
from layoutsearch.cost.library import CostLibrary, ModelRows
from layoutsearch.cost.model import CostModel, ModelIdentity
from layoutsearch.cost.rows import KernelRow, TransformRow
from layoutsearch.cost.train import Rows, fit_from, rows_of
from layoutsearch.measure.profile import DeviceProfile
from layoutsearch.measure.records import RecordContext
from layoutsearch.schedule.target import TargetInfo
from layoutsearch.search.known import Lab
from layoutsearch.search.skeleton import Skeleton


class Learned:
    """Cost model and correction of a run, and what it adds to them.

    Args:
        context: device, target, versions: what rows may be read together.
        profile: of the device; nominal figures without.
        target: vectors and caches.
        model: fingerprint of the model at hand.
        library: rows of earlier runs; the user's by default.
    """

    def __init__(
        self,
        context: RecordContext,
        profile: DeviceProfile | None,
        target: TargetInfo,
        model: str,
        library: CostLibrary | None = None,
    ) -> None:
        self._identity = ModelIdentity.of(context)
        self._profile, self._target, self._model = profile, target, model
        self._library = library or CostLibrary(self._identity)
        found = list(self._library.models())
        self._others = [rows for rows in found if rows.model != model]
        self._wholes = [whole for rows in found for whole in rows.wholes]

    def cost_model(self) -> CostModel | None:
        """Fitted to the other models; None if nothing was measured of any yet."""
        rows = sum((rows.rows for rows in self._others), Rows())
        return self._fit(rows) if rows.kernels else None

    def refit(self, kernels: Sequence[KernelRow], transforms: Sequence[TransformRow]) -> CostModel:
        """Fitted to the other models and to rows of this one."""
        return self._fit(sum((rows.rows for rows in self._others), Rows(tuple(kernels), tuple(transforms))))

    def correction(self) -> Correction:
        """Fitted to the whole timings of all models, earlier ones of this one included."""
        return Correction.fit(self._wholes, self._identity)

    def keep(self, skeleton: Skeleton, lab: Lab, wholes: Sequence[WholeRow]) -> None:
        """Add what this run knows of its model to the library.

        Raises:
            LibraryError: it cannot be written.
        """
        earlier = [whole for whole in self._wholes if whole.model == self._model]
        rows = rows_of(skeleton, lab, self._model)
        if rows.kernels:
            self._library.save(ModelRows(self._model, rows, tuple(dict.fromkeys([*earlier, *wholes]))))

    def _fit(self, rows: Rows) -> CostModel:
        return fit_from([rows], self._profile, target=self._target, identity=self._identity)
