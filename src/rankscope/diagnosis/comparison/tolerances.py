"""How far two values may be apart by rounding alone: by dtype, or as far as noise was measured.

`diagnosis/evidence/distances.py` knows one rounding of a dtype; here is what roundings add up to in
a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from rankscope.diagnosis.comparison.alignment import AlignedValue, SlotKey
from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.record.phases import Phase

DEFAULTS: Final = {
    "float64": (1e-10, 1e-9),
    "float32": (5e-6, 5e-5),
    "float16": (4e-3, 2e-2),
    "bfloat16": (2.4e-2, 8e-2),
    "complex64": (5e-6, 5e-5),
    "complex128": (1e-10, 1e-9),
}
"""Relative L2 distance by which a value of forward and a gradient may be off, by dtype: what
kernels that add in another order leave over some layers. Integers have none."""
_UPDATE_SPREAD: Final = 3.0
_COARSE: Final = 1e-4
"""Roundings above it are those of half precision, which no run repeats exactly."""
_NOISES: Final = 4.0
"""A value may be off by so many times its measured noise."""


class Tolerances:
    """How far the values of a step may be off by rounding alone."""

    resolution: Final = 1e-6
    """Relative distance below which sketches, whose factors are float32, tell nothing."""

    def __init__(self, values: Iterable[AlignedValue], noise: Mapping[SlotKey, float]) -> None:
        """Take the values of a step, and the relative distance of each value between two runs of
        the reference. Under autocast the coarsest dtype of activations rounds others too."""
        self._noise = noise
        activations = [v for v in values if v.key.phase.facts.is_activation]
        known = [DEFAULTS[d] for v in activations for d in v.dtypes if d in DEFAULTS]
        self._coarsest = max(known, default=(0.0, 0.0))

    def of(self, value: AlignedValue) -> float:
        """Return the relative L2 distance that the coarser of both dtypes explains."""
        measured = self.noise_of(value)
        if measured is not None:
            return measured
        rounding = 0.0
        if value.key.phase is Phase.SETUP:
            rounding = max(map(rounding_of, value.dtypes)) if len(value.dtypes) > 1 else 0.0
        elif not value.dtypes.isdisjoint(DEFAULTS):
            is_gradient = value.key.phase in (Phase.BACKWARD, Phase.GRADS)
            rounding = self._by_rounding(value)[is_gradient]
        return max(rounding, self.resolution)

    def noise_of(self, value: AlignedValue) -> float | None:
        """Return the distance that measured noise explains, None where none was measured: at
        least half a rounding of its dtype."""
        found = self._noise.get(value.key)
        if found is None or not math.isfinite(found) or value.key.phase is Phase.SETUP:
            return None
        rounding = max(map(rounding_of, value.dtypes)) / 2 if len(value.dtypes) == 1 else 0.0
        coarse = rounding if rounding > _COARSE else 0.0
        return max(_NOISES * found, coarse, self.resolution)

    def of_update(self, value: AlignedValue, gradient_error: float) -> float:
        """Return the same for what an optimizer adds: where it takes the sign of a gradient, the
        square root of the gradient's error is that of the update."""
        return _UPDATE_SPREAD * math.sqrt(max(self._by_rounding(value)[1], gradient_error))

    def _by_rounding(self, value: AlignedValue) -> tuple[float, float]:
        return max((*(DEFAULTS[d] for d in value.dtypes if d in DEFAULTS), self._coarsest))
