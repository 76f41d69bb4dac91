"""Factors of the composable sketch: a separable random weight for every global index.

The sketch of a tensor x is, for every projection k of 8,

    s_k(x) = sum over all elements of x[i_0, i_1, ...] * r(k, 0, i_0) * r(k, 1, i_1) * ...

where r(k, d, i) depends only on the projection, the tensor dim and the *global* index, so pieces of
a tensor held by different ranks add up to the sketch of the whole. Along one dim the factor is
split once more, so that a dim of millions of elements needs no table of that size:

    r(k, d, i) = low(k, d, i mod 512) * high(k, d, i div 512)         high(k, d, 0) = 1

All variables are independent with mean 0 and variance 1, hence products over different indices are
uncorrelated and E[(s_k(a) - s_k(b))**2] = |a - b|**2. The first four projections are ±1, the others
uniform on ±sqrt(3): products of signs alone cannot see one row swap in 256, the continuous half
can.

The values come from a counter-based generator (a keyed 64-bit mixer of the SplitMix family, Steele,
Lea and Flood 2014, with constants of our own), so they are the same on every rank, machine and
version. Changing anything here changes the meaning of recorded traces.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.layout.placement import Ranges
from rankscope.record.value import SKETCH_SIZE

RADIX: Final = 512
"""Indices per block: below it a factor is one variable, above it the product of two."""

_STEP: Final = np.uint64(0xBEE58CB3937F0C3D)
_FIRST: Final = np.uint64(0xEB9EEDC79EE128D1)
_SECOND: Final = np.uint64(0xD9670F5DAA1A8F4F)
_SEED: Final = np.uint64(0xC6CE91D9F29196ED)
_SIGNS: Final = SKETCH_SIZE // 2
_SHORT: Final = 1 << 12
"""Indices up to which factors of 256 ranges are kept: 128 KiB each."""
_LONG: Final = 1 << 18
"""The same for four longer ranges, 8 MiB each: enough for a vocabulary beside any lengths."""


def factors(dim: int, ranges: Ranges) -> npt.NDArray[np.float32]:
    """Return r(k, dim, i) for all i of half-open `ranges`: [8, total length] float32, read-only."""
    count = sum(stop - start for start, stop in ranges)
    if count <= _SHORT:
        return _kept_short(dim, ranges)
    return _kept_long(dim, ranges) if count <= _LONG else _compute(dim, ranges)


def block_factors(dim: int, first: int, count: int) -> npt.NDArray[np.float32]:
    """Return high(k, dim, b) of `count` blocks of RADIX indices: [8, count] float32."""
    blocks = np.arange(first, first + count, dtype=np.uint64)
    values = _draw(dim, 1, blocks)
    values[:, blocks == 0] = 1.0
    return values


def product_factors(dims: Sequence[tuple[int, Ranges]]) -> npt.NDArray[np.float32]:
    """Return [8, product of the lengths] float32: the products of the factors of several (dim,
    ranges), outermost first, flattened in row-major order; without dims one column of ones."""
    product: npt.NDArray[np.float32] = np.ones((SKETCH_SIZE, 1), dtype=np.float32)
    for dim, ranges in dims:
        wide = product[:, :, None] * factors(dim, ranges)[:, None, :]
        product = wide.reshape(SKETCH_SIZE, -1)
    return product


def _compute(dim: int, ranges: Ranges) -> npt.NDArray[np.float32]:
    if not ranges:
        return np.empty((SKETCH_SIZE, 0), dtype=np.float32)
    index = np.concatenate([np.arange(start, stop, dtype=np.uint64) for start, stop in ranges])
    values = _draw(dim, 0, index % np.uint64(RADIX))
    block = index // np.uint64(RADIX)
    if block.size and int(block.max()) > 0:
        high = _draw(dim, 1, block)
        high[:, block == 0] = 1.0
        values *= high
    values.flags.writeable = False
    return values


_kept_short = functools.lru_cache(maxsize=256)(_compute)
_kept_long = functools.lru_cache(maxsize=4)(_compute)


def _draw(dim: int, level: int, counter: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return [8, n] float32 variables of (k, dim, level, counter)."""
    streams = np.arange(SKETCH_SIZE, dtype=np.uint64) + np.uint64((2 * dim + level) * SKETCH_SIZE)
    keys = _mix(_mix(streams + _SEED) ^ _SECOND)
    bits = _mix(keys[:, None] + (counter + np.uint64(1)) * _STEP)
    # 53 bits: what a double holds exactly, so every machine makes the same number
    unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    unit[:_SIGNS] = np.where(unit[:_SIGNS] < 0.5, -1.0, 1.0)
    unit[_SIGNS:] = (2.0 * unit[_SIGNS:] - 1.0) * 3.0**0.5
    values: npt.NDArray[np.float32] = unit.astype(np.float32)
    return values


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(31))) * _FIRST
    z = (z ^ (z >> np.uint64(29))) * _SECOND
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(32))
    return mixed
