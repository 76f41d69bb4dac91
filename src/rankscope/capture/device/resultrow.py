"""What a device computes of one value: a row of float64 numbers, and what they mean."""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.capture.fold import FoldPlan
from rankscope.capture.reading import ValueNumbers
from rankscope.record.value import SKETCH_SIZE

HASH: Final = 10
"""Before it: finite, nan, +inf, -inf, zero, min, max, mean, root of the sum of squares about
the mean, norm. The hash lies there as the bits of a number: 0 of a value without elements."""
SKETCH: Final = 11
"""8 numbers of the whole sketch, or 8 for each sample without the factor of the batch dim."""
_SAME_STATISTICS: Final = 2e-6
_LEAST: Final = float(np.finfo(np.float64).tiny)  # numbers below it have few digits


def row_size(plan: FoldPlan) -> int:
    """Return how many numbers the row of such a value has."""
    samples = 1 if plan.batch_factors is None else len(plan.batch_factors)
    return SKETCH + samples * SKETCH_SIZE


def reading_of_row(
    plan: FoldPlan, numbers: npt.NDArray[np.float64], words: npt.NDArray[np.int64]
) -> ValueNumbers:
    """Return the reading of a value: `numbers` begin with its row, `words` are their bits."""
    samples, sketch = None, numbers[SKETCH : SKETCH + SKETCH_SIZE]
    if plan.batch_factors is not None:
        parts = numbers[SKETCH : row_size(plan)].reshape(-1, SKETCH_SIZE)
        samples, sketch = parts.astype(np.float32), (parts * plan.batch_factors).sum(0)
    finite, nan, posinf, neginf, zero = (int(n) for n in numbers[:5])
    low, high, mean, deviation, norm = numbers[5:HASH].tolist()
    if not finite:
        low = high = mean = math.nan
    std = deviation / math.sqrt(finite - 1) if finite > 1 else math.nan
    return ValueNumbers(
        plan.count, int(words[HASH]) % (1 << 64), nan, posinf, neginf, zero, low, high, mean, std,
        norm if finite else 0.0, tuple(sketch.tolist()), samples, False,
    )  # fmt: skip


def agree(one: ValueNumbers, other: ValueNumbers) -> bool:
    """True where two ways of reading the same value gave the same numbers, to rounding."""
    slack = _SAME_STATISTICS * other.l2 + _LEAST
    about = _SAME_STATISTICS * other.l2 / math.sqrt(max(other.count, 1)) + _LEAST
    same = partial(np.allclose, rtol=_SAME_STATISTICS, equal_nan=True)
    summed = partial(np.allclose, rtol=0, atol=10 * slack, equal_nan=True)
    return bool(
        one[:6] == other[:6]
        and same((one.min, one.max, one.l2), (other.min, other.max, other.l2), atol=_LEAST)
        and same((one.mean, one.std), (other.mean, other.std), atol=about)
        and summed(one.sketch, other.sketch)
        and (
            one.samples is other.samples
            if one.samples is None or other.samples is None
            else summed(one.samples, other.samples)
        )
    )
