"""How a tensor of any shape is folded to 2-D so that its sketch is one matrix product.

The trailing dims make the columns (a few hundred to a few thousand, float32 factors), the leading
dims the rows (float64 weights)::

    values [rows, inner] @ matrix [inner, 8]  ->  [rows, 8],  then weighted and summed over rows

A dim too long for that is cut at multiples of 512 global indices, where its factor is the product
of a low and a high part (see `rankscope.record.sketchfactors`): a vector of millions of elements
needs the 512 columns of the low part alone, whatever index its shard begins at. The unaligned ends
of a shard then are segments of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from rankscope.layout.placement import Ranges
from rankscope.record.sketchfactors import RADIX, block_factors, factors, product_factors
from rankscope.record.value import MAX_SAMPLES, SKETCH_SIZE

BLOCK_ELEMENTS = 1 << 19
"""Elements looked at together: bounds every temporary to a few MB."""
BLOCK_ROWS = 8192
"""Rows of a block at most: OpenBLAS starts threads for dot products above 10,000."""
MULTIPLY_ELEMENTS = 1 << 15
"""Elements of one product with 8 columns: OpenBLAS starts threads above 2**18 operations. The
program did not ask for threads of ours, and limiting OpenBLAS through its own calls would be
process-wide. Batches of this size cost no measurable time."""
TINY_ELEMENTS = 2048
"""Up to this size all dims make columns: one product, no row weights."""
_ENOUGH_INNER = 256
_ENOUGH_WIDTH = 2048
_LEAST_INNER = 64
_MOST_INNER = 4096
_MOST_PIECES = 64
_TILE = 64
"""Columns copied at a time where neighbours in a row lie far apart in memory."""

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class FoldSegment:
    """A box of the tensor (None: all of it) in which one fold holds: `inner` columns, and rows."""

    where: tuple[slice, ...] | None
    inner: int
    rows: int
    matrix: npt.NDArray[np.float32]
    """[inner, 8] factors of the trailing dims."""
    multiply_rows: int
    sum_width: int
    """Row length for sums where one block is the whole segment."""
    outer: tuple[npt.NDArray[np.float32], ...]
    """[8, n] factors of every leading dim, outermost first."""
    sample: int = 0
    """Index of the batch dim that this segment holds, where single samples are segments."""

    @cached_property
    def matrix64(self) -> npt.NDArray[np.float64]:
        """[inner, 8] factors of the trailing dims as float64."""
        return self.matrix.astype(np.float64)

    @cached_property
    def _all_weights(self) -> npt.NDArray[np.float64]:
        return self._weights(0, self.rows)

    @property
    def held_bytes(self) -> int:
        """Memory this segment may come to hold."""
        rows = self.rows if self.rows <= BLOCK_ROWS else 0
        return 3 * self.matrix.nbytes + rows * SKETCH_SIZE * 8

    def weights(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Return the [stop - start, 8] products of the leading dims' factors for these rows."""
        if self.rows <= BLOCK_ROWS:
            return self._all_weights[start:stop]
        return self._weights(start, stop)

    def _weights(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        row = np.arange(start, stop)
        product = np.ones((stop - start, SKETCH_SIZE))
        for table in reversed(self.outer):
            row, index = np.divmod(row, table.shape[1])
            product *= table.T[index]
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldPlan:
    """Plan for values of one shape, layout and dtype; the batch dim is None without samples."""

    count: int
    shape: tuple[int, ...]
    """Shape of the array to fold; a scalar is (1,), a complex tensor has a last dim of 2."""
    segments: tuple[FoldSegment, ...]
    batch_factors: npt.NDArray[np.float64] | None
    """[samples, 8] factors of the batch dim."""
    batch_dim: int | None
    whole: FoldSegment | None = None
    """The tensor as one segment, where its rows are few enough for a table of weights."""
    batch_rows: tuple[int, int, int] | None = None
    """Rows of `whole` as (before, samples, after)."""
    is_simple: bool = False
    """One segment, one block: the hot path."""
    is_per_sample: bool = False
    """Rows of a simple plan are samples: only the batch dim's factors weigh them."""

    @property
    def held_bytes(self) -> int:
        """Memory this plan may come to hold."""
        nbytes = sum(segment.held_bytes for segment in self.segments)
        return nbytes if self.is_simple or self.whole is None else nbytes + self.whole.held_bytes


@dataclass(frozen=True, slots=True)
class _FoldPiece:
    """A part of the dim that is cut: local indices, and the factors of its rows and columns."""

    local: slice | None
    columns: Ranges
    rows: npt.NDArray[np.float32] | None


def make_plan(
    shape: Sequence[int],
    ranges: Sequence[Ranges] | None,
    batch_dim: int | None,
    is_complex: bool = False,
) -> FoldPlan:
    """Return the plan for a local shape.

    Args:
        shape: local shape.
        ranges: per dim the global indices held; None: as if each began at 0.
        batch_dim: dim whose samples are kept apart where there are few enough, from the back where
            it is negative; None for no samples.
        is_complex: the array has a last dim of 2 for real and imaginary parts.
    """
    if batch_dim is not None and batch_dim < 0:
        batch_dim += len(shape)
    spans: list[Ranges] = [((0, n),) for n in shape] if ranges is None else list(ranges)
    sizes = list(shape)
    if not sizes:
        sizes, spans, batch_dim = [1], [((0, 1),)], None
    if is_complex:
        sizes, spans = [*sizes, 2], [*spans, ((0, 2),)]
    if batch_dim is not None and not (
        0 <= batch_dim < len(shape) and 0 < sizes[batch_dim] <= MAX_SAMPLES
    ):
        batch_dim = None
    count = int(np.prod(sizes, dtype=object))
    batch = None if batch_dim is None else factors(batch_dim, spans[batch_dim]).T.astype(np.float64)
    plan = partial(
        FoldPlan, count=count, shape=tuple(sizes), batch_factors=batch, batch_dim=batch_dim
    )
    if count == 0:
        return plan(segments=())
    first = 0 if batch_dim is None else batch_dim + 1
    begin, cut = (first, False) if count <= TINY_ELEMENTS else _choose_inner(sizes, first)
    pieces = _cut(begin, spans[begin], sizes[begin]) if cut else [_FoldPiece(None, (), None)]
    box = partial(_segment, sizes, spans, begin, cut, batch_dim)
    if len(pieces) == 1 and pieces[0].local is None:
        segment = box(pieces[0], None)
        if segment.rows <= BLOCK_ROWS:
            plan = partial(
                plan, whole=segment, batch_rows=_batch_rows(sizes, batch_dim, segment.rows)
            )
            if count <= BLOCK_ELEMENTS:
                is_per_sample = batch_dim == 0 and len(segment.outer) == 1
                return plan(segments=(segment,), is_simple=True, is_per_sample=is_per_sample)
    indices: Sequence[int | None] = [None] if batch_dim is None else range(sizes[batch_dim])
    return plan(segments=tuple(box(piece, index) for index in indices for piece in pieces))


def multiply_rows(rows: int, inner: int) -> int:
    """Return how many rows to multiply at a time to stay below the threshold for threads."""
    limit = max(1, MULTIPLY_ELEMENTS // inner)
    # as many products as needed, of equal size where the rows divide: numpy stacks those
    even = -(-rows // -(-rows // limit))
    return even if rows % even == 0 else min(limit, rows)


def sum_width(rows: int, inner: int) -> int:
    """Return a row length near 2,048 that divides rows * inner: float32 sums stay exact enough."""
    width = inner
    while width < _ENOUGH_WIDTH and rows % 2 == 0:
        width, rows = width * 2, rows // 2
    while width > _MOST_INNER:
        divisor = next((d for d in (2, 3, 5, 7) if width % d == 0), width)
        width //= divisor
    return width


def _choose_inner(sizes: list[int], first: int) -> tuple[int, bool]:
    """Return the first dim of the columns, and whether that one is cut by RADIX."""
    inner, begin = 1, len(sizes)
    while begin > first and inner < _ENOUGH_INNER:
        size = sizes[begin - 1]
        if size * inner > _MOST_INNER:
            if inner < _LEAST_INNER and size > RADIX:
                return begin - 1, True
            if inner > 1:
                break
        inner, begin = inner * size, begin - 1
    return min(begin, len(sizes)), False


def _cut(dim: int, ranges: Ranges, size: int) -> list[_FoldPiece]:
    pieces: list[_FoldPiece] = []
    position = 0
    for start, stop in ranges:
        # up to the first multiple, whole blocks, what is left: a shard may begin anywhere
        low = min(-(-start // RADIX) * RADIX, stop)
        high = max(stop // RADIX * RADIX, low)
        for begin, end in ((start, low), (low, high), (high, stop)):
            if begin == end:
                continue
            local = slice(position, position + end - begin)
            position += end - begin
            if end - begin >= RADIX:
                rows = block_factors(dim, begin // RADIX, (end - begin) // RADIX)
                pieces.append(_FoldPiece(local, ((0, RADIX),), rows))
            else:
                pieces.append(_FoldPiece(local, ((begin, end),), None))
    # each piece is a product of its own: many short ones cost more than factors for every index
    if len(pieces) > _MOST_PIECES:
        return [_FoldPiece(None, ranges, None)]
    if len(pieces) == 1 and pieces[0].local == slice(0, size):
        return [_FoldPiece(None, pieces[0].columns, pieces[0].rows)]
    return pieces


def _segment(
    sizes: list[int],
    spans: list[Ranges],
    begin: int,
    cut: bool,
    batch_dim: int | None,
    piece: _FoldPiece,
    sample: int | None,
) -> FoldSegment:
    """Return one segment; the batch dim's factor is left out (one row of ones for each sample)."""
    columns = [(d, spans[d]) for d in range(begin + cut, len(sizes))]
    if cut:
        columns.insert(0, (begin, piece.columns))
    matrix = np.ascontiguousarray(product_factors(columns).T)
    outer = [factors(dim, spans[dim]) for dim in range(begin) if dim != batch_dim]
    if batch_dim is not None and batch_dim < begin:
        samples = sizes[batch_dim] if sample is None else 1
        outer.insert(batch_dim, np.ones((SKETCH_SIZE, samples), dtype=np.float32))
    if piece.rows is not None:
        outer.append(piece.rows)
    where: list[slice] | None = None
    if piece.local is not None or sample is not None:
        where = [slice(None)] * len(sizes)
        if piece.local is not None:
            where[begin] = piece.local
        if sample is not None and batch_dim is not None:
            where[batch_dim] = slice(sample, sample + 1)
    inner, rows = matrix.shape[0], int(np.prod([table.shape[1] for table in outer], dtype=object))
    return FoldSegment(
        where=None if where is None else tuple(where),
        inner=inner,
        rows=rows,
        multiply_rows=multiply_rows(rows, inner),
        sum_width=sum_width(rows, inner),
        matrix=matrix,
        outer=tuple(outer),
        sample=sample or 0,
    )


def _batch_rows(sizes: list[int], batch_dim: int | None, rows: int) -> tuple[int, int, int] | None:
    if batch_dim is None:
        return None
    before = int(np.prod(sizes[:batch_dim], dtype=object))
    return before, sizes[batch_dim], rows // (before * sizes[batch_dim])


def contiguous_runs(view: npt.NDArray[np.generic]) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the elements of an array of any strides in row-major order, in flat contiguous pieces.
    Copied pieces have at most BLOCK_ELEMENTS elements, and end at whole rows of a fold."""
    if view.flags.c_contiguous:
        yield view.reshape(-1)
        return
    if view.size <= BLOCK_ELEMENTS:
        yield flat_copy(view)
        return
    step = BLOCK_ELEMENTS // view[0].size
    if step == 0:
        for part in view:
            yield from contiguous_runs(part)
        return
    step -= step % RADIX if step > RADIX else 0
    for start in range(0, view.shape[0], step):
        yield from contiguous_runs(view[start : start + step])


def flat_copy(view: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the elements of an array in row-major order, flat and contiguous. A transposed array
    is copied in tiles: whole rows would touch a page for every element."""
    if view.ndim < 2 or abs(view.strides[-1]) <= abs(view.strides[-2]):
        return np.ascontiguousarray(view).reshape(-1)
    copy = np.empty(view.shape, view.dtype)
    for start in range(0, view.shape[-1], _TILE):
        copy[..., start : start + _TILE] = view[..., start : start + _TILE]
    return copy.reshape(-1)
