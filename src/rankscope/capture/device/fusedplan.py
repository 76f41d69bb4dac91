"""Where the elements of a value lie, for the fused digest: rows, columns and their factors; and
`mix64`, the hash of values that an accelerator reads: order-sensitive, and a sum.

An element's place in memory, its place in the row-major order that the hash counts in, and its
factor are each a sum, or a product, over the dims. So the dims are dealt out to columns (those
whose neighbours lie close in memory) and rows (the others, samples outermost), each with one table;
a dim too long for the columns is cut at multiples of 512 global indices, as `sketchfactors` cuts
its factors: the low part makes columns, the high part rows. Rows at the ends of a shard then hold
elements in a part of the columns alone.

With w[i] the normalized word of element i as an unsigned 64-bit number (-0 is +0, every NaN the
same one) and fold(w) = w ^ (w >> half of its bits) for words of 32 and 64 bits, fold(w) = w for
shorter ones,

    hash = mix(count + sum over i of fold(w[i]) * BASE**(i + 1))        modulo 2**64

A place in the sum is a power, and powers multiply where places add: a row and a column each bring a
factor, and the sum may be taken in any order. BASE is 5 modulo 8, so its powers differ for 2**62
places. The xxh3 of the host cannot be had that way; hashes of different algorithms never compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.layout.placement import Ranges
from rankscope.record.sketchfactors import RADIX, block_factors, factors
from rankscope.record.value import SKETCH_SIZE

BASE: Final = 0x9E6D4F0B8A3C7525
FIRST: Final = 0x05FE0D58184DD27D
SECOND: Final = 0xFEAE2DAA5057C593
SHIFTS: Final = (31, 29, 32)
"""mix(z): z ^= z >> 31, z *= FIRST, z ^= z >> 29, z *= SECOND, z ^= z >> 32."""


def powers(exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return BASE to these powers, modulo 2**64; negative ones are inverses."""
    found = np.ones(exponents.shape, dtype=np.uint64)
    left = np.abs(exponents)
    inverse = pow(BASE, -1, 1 << 64)
    step = np.where(exponents < 0, np.uint64(inverse), np.uint64(BASE))
    while left.any():
        found = np.where(left & 1, found * step, found)
        step = step * step
        left >>= 1
    return found


BLOCK: Final = 512
"""Columns that one program reads."""
NUMBERS: Final = 14
"""A program's results in floating point: least, greatest, a number near the mean, squares about the
mean, unit, 8 sketches, how far above that number the mean lies.

Means, squares (in units squared) and sketches count in units, a power of two: 1 but for values
whose squares would leave the range of the float; 0 where no value is finite and not zero."""
COUNTS: Final = 6
"""A program's results in integers: sum of mixed words, finite, NaN, +inf, -inf, zero."""
_ENOUGH_COLUMNS: Final = 256
_MOST_WHOLE: Final = 1 << 14
_MOST_COLUMNS: Final = 1 << 16
_MOST_PIECES: Final = 64
_MOST_TABLE_BYTES: Final = 32 << 20
_ROW_BYTES: Final = 56
_PROGRAMS: Final = 1024
_MOST_PROGRAMS: Final = 4096
_FEWEST_ROWS: Final = 16

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPlan:
    """The tables of one shape, strides and layout: of rows and columns the factors of the hash
    (`mix64`), the place in memory in words, and the factors of the sketch ([rows, 8] and [8,
    columns])."""

    row_keys: Keys
    """[rows] the hash's base to the row-major place of column 0."""
    row_offsets: Integers
    """[rows] place of column 0; may be negative, see `row_limits`."""
    row_limits: npt.NDArray[np.int32]
    """[rows, 2] first column of a row that holds an element, and the one behind the last."""
    row_weights: Floats
    column_keys: Keys
    """[columns] the base to what a column adds to the place, and 1."""
    column_offsets: Integers
    column_factors: Floats
    samples: int
    is_plain: bool
    """Column i adds i to the place in memory."""
    is_full: bool
    """Every row holds all columns, and these are a multiple of BLOCK."""
    step: int
    """A power of two, up to 16, that divides every row's offset."""

    @property
    def rows_per_sample(self) -> int:
        """Rows of one sample."""
        return len(self.row_offsets) // self.samples

    @property
    def column_blocks(self) -> int:
        """Programs side by side."""
        return -(-len(self.column_offsets) // BLOCK)

    @property
    def rows_per_program(self) -> int:
        """Rows that one program reads."""
        tiles = len(self.row_offsets) * self.column_blocks
        rows = max(_FEWEST_ROWS, tiles // _PROGRAMS, -(-tiles // _MOST_PROGRAMS))
        # enough programs to fill the device, not so many that adding their results up takes longer
        # than reading
        return min(self.rows_per_sample, rows)

    @property
    def groups(self) -> int:
        """Programs of one sample and one block of columns."""
        return -(-self.rows_per_sample // self.rows_per_program)

    @property
    def programs(self) -> int:
        """Programs of the whole value."""
        return self.samples * self.groups * self.column_blocks


@dataclass(frozen=True, slots=True)
class _Axis:
    """Indices of one dim that rows or columns go through; factors are [8, n]."""

    positions: Integers
    offsets: Integers
    factors: Floats


def make_fused_plan(
    shape: Sequence[int],
    strides: Sequence[int],
    ranges: Sequence[Ranges] | None,
    batch_dim: int | None,
) -> FusedPlan | None:
    """Return the plan for a non-empty value; None where the tables would be too large: very many
    pieces, or short rows.

    Args:
        shape: sizes of the dims; a complex value has a last dim of 2.
        strides: of the same dims, in words.
        ranges: per dim the global indices held; None: as if each began at 0.
        batch_dim: dim whose samples are kept apart, None for no samples.
    """
    held = [((0, n),) for n in shape] if ranges is None else list(ranges)
    logical = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    chosen, cut, others = _deal(shape, strides, batch_dim)

    def axis(dim: int) -> _Axis:
        index = np.arange(shape[dim], dtype=np.int64)
        return _Axis(index * logical[dim], index * strides[dim], factors(dim, held[dim]))

    rows, columns = _nothing(), _nothing()
    for dim in chosen:
        columns = _outer(axis(dim), columns)
    inner = len(columns.positions)
    limits = np.array([[0, inner]], dtype=np.int64)
    if cut is not None:
        low = np.arange(RADIX, dtype=np.int64)
        lows = _Axis(low * logical[cut], low * strides[cut], factors(cut, ((0, RADIX),)))
        columns = _outer(lows, columns)
        local, limits, weights = _blocks(cut, held[cut])
        if len(local) > shape[cut] // RADIX + 2 * _MOST_PIECES:
            return None
        limits = limits * inner
        rows = _Axis(local * logical[cut], local * strides[cut], weights)
    for dim in others:
        if len(rows.positions) * shape[dim] * _ROW_BYTES > _MOST_TABLE_BYTES:
            return None
        one = axis(dim)
        if dim == batch_dim:  # its factor is left out of the sketch of a sample
            one = _Axis(one.positions, one.offsets, np.ones_like(one.factors))
        rows = _outer(one, rows)
    limits = np.tile(limits, (len(rows.positions) // len(limits), 1))
    is_plain = np.array_equal(columns.offsets, np.arange(len(columns.offsets)))
    is_full = len(columns.offsets) % BLOCK == 0 and bool(
        (limits == (0, len(columns.offsets))).all()
    )
    common = int(np.gcd.reduce(rows.offsets)) or 16
    return FusedPlan(
        row_keys=powers(rows.positions),
        row_offsets=rows.offsets,
        row_limits=np.ascontiguousarray(limits, dtype=np.int32),
        row_weights=np.ascontiguousarray(rows.factors.T, dtype=np.float32),
        column_keys=powers(columns.positions + 1),
        column_offsets=columns.offsets,
        column_factors=np.ascontiguousarray(columns.factors, dtype=np.float32),
        samples=1 if batch_dim is None else shape[batch_dim],
        is_plain=is_plain,
        is_full=is_full,
        step=min(16, common & -common),
    )


def _deal(
    shape: Sequence[int], strides: Sequence[int], batch_dim: int | None
) -> tuple[list[int], int | None, list[int]]:
    """Deal the dims out: those of the columns, close in memory first; the dim that is cut, its low
    part above them, None for none; those of the rows, outermost last."""
    order = sorted(
        (d for d in range(len(shape)) if d != batch_dim and shape[d] > 1),
        # neighbours in memory first, so that loads of a block are wide; expanded dims last, their
        # elements are one
        key=lambda d: (strides[d] == 0, abs(strides[d]), -d),
    )
    inner, cut, chosen = 1, None, list[int]()
    for dim in order:
        if inner >= _ENOUGH_COLUMNS:
            break
        if inner * shape[dim] > _MOST_WHOLE:
            if shape[dim] > RADIX and inner * RADIX <= _MOST_COLUMNS:
                cut = dim
            break
        chosen.append(dim)
        inner *= shape[dim]
    lone = [d for d in range(len(shape)) if shape[d] == 1 and d != batch_dim]
    others = [d for d in order if d not in chosen and d != cut]
    return chosen, cut, [*lone, *others, *([] if batch_dim is None else [batch_dim])]


def _nothing() -> _Axis:
    zero = np.zeros(1, dtype=np.int64)
    return _Axis(zero, zero, np.ones((SKETCH_SIZE, 1), dtype=np.float32))


def _outer(slow: _Axis, fast: _Axis) -> _Axis:
    """Return all pairs of indices, those of `fast` next to each other."""
    return _Axis(
        (slow.positions[:, None] + fast.positions).reshape(-1),
        (slow.offsets[:, None] + fast.offsets).reshape(-1),
        (slow.factors[:, :, None] * fast.factors[:, None, :]).reshape(SKETCH_SIZE, -1),
    )


def _blocks(dim: int, held: Ranges) -> tuple[Integers, Integers, Floats]:
    """Return the blocks of RADIX global indices that a cut dim touches: the local index that a
    block's index 0 would have; [blocks, 2] the indices of the block that are held; [8, blocks]
    factors."""
    local, limits, weights = list[Integers](), list[Integers](), list[Floats]()
    position = 0
    for start, stop in held:
        first, last = start // RADIX, -(-stop // RADIX)
        begins = np.arange(first, last, dtype=np.int64) * RADIX
        local.append(begins - start + position)
        bounds = (np.maximum(start - begins, 0), np.minimum(stop - begins, RADIX))
        limits.append(np.stack(bounds, axis=1))
        weights.append(block_factors(dim, first, last - first))
        position += stop - start
    return np.concatenate(local), np.concatenate(limits), np.concatenate(weights, axis=1)
