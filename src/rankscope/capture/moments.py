"""Counts, extrema, moments and projections of one block of values.

Two ways to the same numbers. `measure` works in the block's own float32 or float64 at memory speed;
row sums are combined in float64. It declines a block for which that is not exact enough: NaN,
infinities, magnitudes whose squares leave the range of the type. `measure_carefully` takes those.
"""

from __future__ import annotations

import functools
import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    *("NO_VALUES", "Flags", "ValueBlock"),
    *("combined", "measure", "measure_carefully", "measure_small"),
]

Floats = npt.NDArray[np.floating]

_LARGE: Final = {4: 1e15, 8: 1e150}
_SMALL: Final = {4: 1e-12, 8: 1e-150}
_CANCELLATION: Final = 0.25
"""Below this share of the sum of squares, squared deviations are summed around the mean."""
_minimum = np.minimum.reduce
_maximum = np.maximum.reduce
_add = np.add.reduce
_ones: Final = functools.lru_cache(maxsize=256)(np.ones)


class ValueBlock(NamedTuple):
    """What one block adds to a digest. Deviation is the root of the sum of squared deviations from
    the mean, norm the root of the sum of squares."""

    finite: int
    nan: int
    posinf: int
    neginf: int
    zero: int
    min: float
    max: float
    mean: float
    deviation: float
    norm: float


NO_VALUES: Final = ValueBlock(0, 0, 0, 0, 0, math.nan, math.nan, math.nan, 0.0, 0.0)


class Flags:
    """Booleans of one thread, searched as bytes: finding none is faster than counting."""

    def __init__(self) -> None:
        self._held = bytearray(1 << 17)
        self._array = np.frombuffer(self._held, dtype=np.bool_)

    def count_zeros(self, flat: Floats) -> int:
        """Return how many elements of a flat array are ±0."""
        count = flat.size
        if count > self._array.size:
            self._held = bytearray(count)
            self._array = np.frombuffer(self._held, dtype=np.bool_)
        is_zero = self._array[:count]
        np.equal(flat, 0, out=is_zero)
        return 0 if self._held.find(1, 0, count) < 0 else int(np.count_nonzero(is_zero))


def measure(flat: Floats, width: int, flags: Flags) -> ValueBlock | None:
    """Return the moments of a non-empty flat array ([n] float32 or float64), None where it has to
    be looked at carefully.

    `width`, a divisor of n, is the length of the rows whose sums are taken in the array's own type;
    `flags` are scratch of this thread.
    """
    size = flat.dtype.itemsize
    low, high = float(_minimum(flat)), float(_maximum(flat))
    reach = high if high > -low else -low
    # a NaN makes every comparison false
    if not reach < _LARGE[size] or 0.0 < reach < _SMALL[size]:
        return None
    count = flat.size
    zero = 0 if low > 0.0 or high < 0.0 else flags.count_zeros(flat)
    rows = flat.reshape(-1, width)
    ones = _ones(width, flat.dtype)
    total = float(_add(np.vecdot(rows, ones), dtype=np.float64))
    squares = float(_add(np.vecdot(rows, rows), dtype=np.float64))
    mean = total / count
    around = squares - total * mean
    if around < _CANCELLATION * squares:
        center = flat.dtype.type(mean)
        away = rows - center
        rest = float(_add(np.vecdot(away, ones), dtype=np.float64))
        around = max(
            0.0, float(_add(np.vecdot(away, away), dtype=np.float64)) - rest * rest / count
        )
        mean = float(center) + rest / count
    return ValueBlock(count, 0, 0, 0, zero, low, high, mean, math.sqrt(around), math.sqrt(squares))


def measure_small(flat: npt.NDArray[np.float64]) -> ValueBlock | None:
    """Return the moments of a few thousand float64 values at most, None as `measure` does."""
    low, high = float(_minimum(flat)), float(_maximum(flat))
    reach = high if high > -low else -low
    if not reach < 1e150 or 0.0 < reach < 1e-150:
        return None
    count = flat.size
    zero = 0 if low > 0.0 or high < 0.0 else count - int(np.count_nonzero(flat))
    mean = float(_add(flat)) / count
    away = flat - mean
    deviation, norm = math.sqrt(np.vecdot(away, away)), math.sqrt(np.vecdot(flat, flat))
    return ValueBlock(count, 0, 0, 0, zero, low, high, mean, deviation, norm)


def measure_carefully(flat: Floats) -> tuple[ValueBlock, npt.NDArray[np.float64], float]:
    """Return the moments of any flat values, and what to project: the values as float64, with 0 for
    those that are not finite, divided by a scale; and that scale, a power of two."""
    values = flat.astype(np.float64)
    finite = np.isfinite(values)
    count = int(np.count_nonzero(finite))
    nan = int(np.count_nonzero(np.isnan(values)))
    posinf = int(np.count_nonzero(values == np.inf))
    neginf = flat.size - count - nan - posinf
    zero = int(np.count_nonzero(values == 0))
    if count == 0:
        values[:] = 0.0
        return NO_VALUES._replace(nan=nan, posinf=posinf, neginf=neginf), values, 1.0
    low = float(_minimum(np.where(finite, values, np.inf)))
    high = float(_maximum(np.where(finite, values, -np.inf)))
    values = np.where(finite, values, 0.0)
    scale = _scale(max(-low, high))
    if scale != 1.0:
        values /= scale
    mean = float(_add(values)) / count
    away = np.where(finite, values - mean, 0.0) if count != flat.size else values - mean
    deviation, norm = math.sqrt(_squares(away)) * scale, math.sqrt(_squares(values)) * scale
    block = ValueBlock(count, nan, posinf, neginf, zero, low, high, mean * scale, deviation, norm)
    return block, values, scale


def _scale(reach: float) -> float:
    if reach == 0.0 or _SMALL[8] < reach < _LARGE[8]:
        return 1.0
    # two below the largest power keeps the scale itself and its inverse in range
    return math.ldexp(1.0, max(-1020, min(1020, math.frexp(reach)[1])))


def _squares(values: npt.NDArray[np.float64]) -> float:
    return float(_add(np.square(values)))


def combined(one: ValueBlock, other: ValueBlock) -> ValueBlock:
    """Return the moments of two blocks together (pairwise update: Chan, Golub, LeVeque 1979). Roots
    are combined by hypot, so that nothing overflows before the result itself does."""
    if not one.finite:
        one, other = other, one
    low, high, mean, deviation, norm = one[5:]
    both = one.finite + other.finite
    if other.finite:
        apart = other.mean - mean
        between = abs(apart) * math.sqrt(one.finite * (other.finite / both))
        deviation = math.hypot(deviation, other.deviation, between)
        norm = math.hypot(norm, other.norm)
        mean += apart * (other.finite / both)
        low, high = min(low, other.min), max(high, other.max)
    return ValueBlock(
        both, one.nan + other.nan, one.posinf + other.posinf, one.neginf + other.neginf,
        one.zero + other.zero, low, high, mean, deviation, norm,
    )  # fmt: skip
