"""One value of both traces with what is known of their distance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.comparison.alignment import AlignedValue, SlotKey
from rankscope.diagnosis.comparison.difference import Difference

__all__ = ["ComparedValue"]

Array = NDArray[Any]


@dataclass(slots=True, eq=False, kw_only=True)
class ComparedValue:
    """One value of both traces with what is known of their distance."""

    value: AlignedValue
    difference: Difference | None
    reason: str
    """Why it is not judged; "" where it is."""
    allowed: float
    """Relative distance that rounding explains, before anything is inherited."""
    errors: Array = field(default_factory=lambda: np.zeros(0))
    """[p] relative L2 distance of every part, legal factors taken out."""
    scales: Array | float = 1.0
    """The legal factors, by part."""
    other_samples: tuple[int, int] = (0, 0)
    """Of the root's input: samples that are missing, and samples that the reference has not."""
    is_repeated: bool = False
    """Of the root's input: True where samples are missing because others came twice."""
    is_missing: bool = False
    """True where the reference has a gradient and the test has none."""
    is_left: bool = False
    """True where it is not judged by itself: another value tells its difference, or will."""
    ref_norm: float = 0.0
    """L2 norm of the reference's value; NaN where it is not known."""
    raw_error: float = 0.0
    """As `error`, relative to the reference's own norm, however small."""
    unsure: float = 0.0
    """Of an update: what roundings of the parameter before and after it leave, relative."""
    by_rounding: float = math.inf
    """Of an update: as `allowed`, without what the error of its gradient explains."""
    is_update: bool = False
    """True where the difference is that of what the optimizer added."""
    is_moved_alone: bool = False
    """Of an update: True where the reference's parameter stayed as it was."""
    is_plain_update: bool = False
    """True where that difference is a part of the update and of the parameter, as another learning
    rate and weight decay leave it."""

    @property
    def key(self) -> SlotKey:
        """The reference's words for it."""
        return self.value.key

    @property
    def error(self) -> float:
        """The largest relative L2 distance of its parts."""
        return float(self.errors.max(initial=0.0))

    @property
    def is_left_behind(self) -> bool:
        """True for a parameter that the step moved in the reference and did not here."""
        if self.difference is None or not self.is_update:
            return False
        _, own, theirs = self.difference.dots.sum(0).tolist()
        return bool(own > 0 and theirs == 0)

    @property
    def is_of_choices(self) -> bool:
        """True for a mask, and for indices of which each comes many times, as those of experts do:
        positions come once."""
        if self.difference is None or not self.value.is_discrete:
            return False
        ref = self.difference.ref
        return self.value.is_mask or ref.count >= 2 * (ref.greatest - ref.least + 1)
