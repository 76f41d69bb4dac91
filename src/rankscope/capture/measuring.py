"""The numbers of one array of stored words: by the kernel in one pass, or by numpy.

The kernel (`rankscope.capture.kernel`) takes values of nearly all types in one pass. Without a
kernel, or where it refuses a value, numpy takes them by blocks, to the same last digits of float32
sums. `_measure` works in a block's own float32 or float64 at memory speed; row sums are
combined in float64. It declines a block for which that is not exact enough (NaN, infinities,
magnitudes whose squares leave the range of the type), and `_measure_carefully` takes that one.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rankscope.capture.dtypestorage import Array, Floats, Storage
from rankscope.capture.fold import (
    BLOCK_ELEMENTS,
    BLOCK_ROWS,
    FoldPlan,
    FoldSegment,
    contiguous_runs,
    multiply_rows,
    sum_width,
)
from rankscope.capture.kernel import KNOWN, REFUSED, BoundKernel, Kernel, Workspace, load
from rankscope.record.statistics import ADDED_UNKNOWN
from rankscope.record.value import SKETCH_SIZE

Doubles = npt.NDArray[np.float64]

# the stubs know neither the `axis` of vecdot nor that ctypes memory and arrays are buffers
_vecdot: Final[Any] = np.vecdot
words_at: Final[Any] = np.frombuffer  # (ctypes memory, dtype)

_LEAST_COLUMNS: Final = 16
_MOST_SHORT_ROWS: Final = 256
"""Most rows of fewer than `_LEAST_COLUMNS` columns for which the kernel is used."""
_LARGE: Final = {4: 1e15, 8: 1e150}
_SMALL: Final = {4: 1e-12, 8: 1e-150}
_CANCELLATION: Final = 0.25
"""Below this share of the sum of squares, squared deviations are summed around the mean."""
_minimum = np.minimum.reduce
_maximum = np.maximum.reduce
_add = np.add.reduce
_ones: Final = functools.lru_cache(maxsize=256)(np.ones)


class _ValueBlock(NamedTuple):
    """Contribution of one block to a digest. Deviation is the root of the sum of squared deviations
    from the mean, norm the root of the sum of squares."""

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


_NO_VALUES: Final = _ValueBlock(0, 0, 0, 0, 0, math.nan, math.nan, math.nan, 0.0, 0.0)


def _measure(flat: Floats, width: int) -> _ValueBlock | None:
    """Return the moments of a non-empty flat array ([n] float32 or float64), None where it has to
    be looked at carefully.

    `width`, a divisor of n, is the length of the rows whose sums are taken in the array's own type.
    """
    size = flat.dtype.itemsize
    low, high = float(_minimum(flat)), float(_maximum(flat))
    reach = high if high > -low else -low
    # a NaN makes every comparison false
    if not reach < _LARGE[size] or 0.0 < reach < _SMALL[size]:
        return None
    count = flat.size
    zero = 0 if low > 0.0 or high < 0.0 else count - int(np.count_nonzero(flat))
    rows = flat.reshape(-1, width)
    ones = _ones(width, flat.dtype)
    # rows of a few thousand in the array's own type, their sums in float64: fast, and the errors
    # do not grow with the value
    total = float(_add(np.vecdot(rows, ones), dtype=np.float64))
    squares = float(_add(np.vecdot(rows, rows), dtype=np.float64))
    mean = total / count
    # the textbook form cancels where the mean is large: then once more, about the mean
    around = squares - total * mean
    if around < _CANCELLATION * squares:
        # the mean as the array's own type can hold it: the rest is added again below, in
        # float64
        center = flat.dtype.type(mean)
        away = rows - center
        residual = float(_add(np.vecdot(away, ones), dtype=np.float64))
        around = max(
            0.0, float(_add(np.vecdot(away, away), dtype=np.float64)) - residual * residual / count
        )
        mean = float(center) + residual / count
    return _ValueBlock(count, 0, 0, 0, zero, low, high, mean, math.sqrt(around), math.sqrt(squares))


def _measure_carefully(flat: Floats) -> tuple[_ValueBlock, npt.NDArray[np.float64], float]:
    """Return the moments of any flat values, the array to project (float64, 0 for elements that are
    not finite, divided by a scale), and that scale, a power of two."""
    # a copy in any case: what is not finite becomes 0 in it, and the program's memory stays as it
    # is
    values = flat.astype(np.float64)
    finite = np.isfinite(values)
    count = int(np.count_nonzero(finite))
    nan = int(np.count_nonzero(np.isnan(values)))
    posinf = int(np.count_nonzero(values == np.inf))
    neginf = flat.size - count - nan - posinf
    zero = int(np.count_nonzero(values == 0))
    if count == 0:
        values[:] = 0.0
        return _NO_VALUES._replace(nan=nan, posinf=posinf, neginf=neginf), values, 1.0
    low = float(_minimum(np.where(finite, values, np.inf)))
    high = float(_maximum(np.where(finite, values, -np.inf)))
    values = np.where(finite, values, 0.0)
    scale = _scale(max(-low, high))
    if scale != 1.0:
        values /= scale
    mean = float(_add(values)) / count
    away = np.where(finite, values - mean, 0.0) if count != flat.size else values - mean
    deviation, norm = math.sqrt(_squares(away)) * scale, math.sqrt(_squares(values)) * scale
    block = _ValueBlock(count, nan, posinf, neginf, zero, low, high, mean * scale, deviation, norm)
    return block, values, scale


def _scale(reach: float) -> float:
    if reach == 0.0 or _SMALL[8] < reach < _LARGE[8]:
        return 1.0
    # two below the largest power keeps the scale itself and its inverse in range
    return math.ldexp(1.0, max(-1020, min(1020, math.frexp(reach)[1])))


def _squares(values: npt.NDArray[np.float64]) -> float:
    return float(_add(np.square(values)))


def _combined(first: _ValueBlock, second: _ValueBlock) -> _ValueBlock:
    """Return the moments of two blocks together (pairwise update: Chan, Golub, LeVeque 1979). Roots
    are combined by hypot, so that nothing overflows before the final number does."""
    if not first.finite:
        first, second = second, first
    low, high, mean, deviation, norm = first[5:]
    count = first.finite + second.finite
    if second.finite:
        distance = second.mean - mean
        between = abs(distance) * math.sqrt(first.finite * (second.finite / count))
        deviation = math.hypot(deviation, second.deviation, between)
        norm = math.hypot(norm, second.norm)
        mean += distance * (second.finite / count)
        low, high = min(low, second.min), max(high, second.max)
    return _ValueBlock(
        count, first.nan + second.nan, first.posinf + second.posinf, first.neginf + second.neginf,
        first.zero + second.zero, low, high, mean, deviation, norm,
    )  # fmt: skip


class ValueNumbers(NamedTuple):
    """The numbers of one value: count, hash, and the statistics that the kernels measure, in the
    order of `rankscope.record.statistics.MEASURED`, which is that of spools."""

    count: int  # type: ignore[assignment]  # nobody counts in a reading as in a tuple
    hash: int
    nan: int
    posinf: int
    neginf: int
    zero: int
    min: float
    max: float
    mean: float
    std: float
    l2: float
    sketch: tuple[float, ...]
    samples: npt.NDArray[np.float32] | None
    """[samples, 8] sketches of the single samples, the batch dim's own factor left out."""
    reused: bool
    """Statistics and sketch of the same object, read earlier in this step."""
    added: tuple[float, ...] = ADDED_UNKNOWN
    """Statistics that `rankscope.record.statistics` computes in Python beside the kernels."""


class ValueForm(NamedTuple):
    """Plan shared by all values of one dtype, shape and layout; `samples` are kept apart."""

    plan: FoldPlan
    storage: Storage
    memory: type[ctypes.Array[ctypes.c_char]]
    dtype: np.dtype[np.generic]
    is_complex: bool
    bound: BoundKernel | None
    samples: int


class Arithmetic:
    """Computes readings; one serves any number of threads."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self.kernel: Kernel | None = load()
        self.memory = self.kernel.new_memory() if self.kernel is not None else None

    def bind(self, plan: FoldPlan, storage: Storage) -> BoundKernel | None:
        """Return the kernel for whole values, None without one or where it does not pay."""
        fold = plan.whole
        if self.kernel is None or fold is None or not _pays(storage, fold.inner, fold.rows):
            return None
        return self.kernel.bind(
            storage.kernel_kind,
            plan.batch_rows or (1, 1, fold.rows),
            fold.matrix,
            fold.weights(0, fold.rows),
            plan.batch_factors,
            storage.table,
        )

    def in_one_pass(
        self, form: ValueForm, address: int, words: int
    ) -> tuple[int, ValueNumbers | None]:
        """Return the raw hash and the reading of contiguous words of the tensor at `address`; no
        reading where they need a careful look."""
        assert form.bound is not None  # the caller asks for such a form
        assert self.memory is not None  # there is one where there is a kernel
        workspace = self._workspace
        outcome = form.bound.read(self.memory, address, words, workspace)
        numbers, sketch = workspace.numbers()
        if outcome == REFUSED:
            return numbers[0], None
        rows = workspace.rows32(form.samples) if form.samples else None
        is_known = outcome == KNOWN
        fields = (form.plan.count, *numbers[1:-1], sketch, rows, is_known, ADDED_UNKNOWN)
        return numbers[0], ValueNumbers._make(fields)

    def forget(self) -> None:
        """Forget every value read: the step is over."""
        if self.memory is not None:
            self.memory.forget()

    @np.errstate(all="ignore")  # huge values overflow here: their warnings are not the program's
    def compute(self, array: Array, form: ValueForm, raw: int) -> ValueNumbers:
        """Return the reading of any words; an array that is not flat is taken by blocks."""
        plan, storage = form.plan, form.storage
        rows: Floats | None = None
        if plan.is_simple and array.ndim == 1:
            segment = plan.segments[0]
            values = storage.values(array)
            block, products, scale = self._products(values, segment, segment.sum_width)
            if plan.batch_factors is None:
                sketch = products[0]
                if segment.outer:
                    sketch = _vecdot(products, segment.weights(0, segment.rows), axis=0)
            else:
                rows = products if plan.is_per_sample else _per_sample(products, segment, plan)
                sketch = _vecdot(rows, plan.batch_factors, axis=0)
            if scale != 1.0:
                sketch, rows = sketch * scale, None if rows is None else rows * scale
        else:
            block, sketch, rows = self._blockwise(array, plan, storage)
        digest = raw
        # only where the measured numbers say that normalizing changes a word
        if storage.normalize is not None and (
            block.nan or (block.zero and has_minus_zero(array, storage))
        ):
            digest = hash_words(array, storage)
        return _reading(plan, block, digest, sketch, rows)

    def _products(
        self, values: Floats, segment: FoldSegment, width: int
    ) -> tuple[_ValueBlock, Floats, float]:
        """Return moments, [rows, 8] products with the segment's columns, and the scale of these."""
        scale = 1.0
        block = _measure(values, width)
        if block is None:
            with np.errstate(all="ignore"):
                block, values, scale = _measure_carefully(values)
        rows = values.size // segment.inner
        at_once = (
            segment.multiply_rows if rows == segment.rows else multiply_rows(rows, segment.inner)
        )
        matrix = segment.matrix if values.dtype.itemsize == 4 else segment.matrix64
        return block, _multiply(values, matrix, rows, at_once), scale

    def _blockwise(
        self, array: Array, plan: FoldPlan, storage: Storage
    ) -> tuple[_ValueBlock, Doubles, Doubles | None]:
        moments, shaped = _NO_VALUES, array.reshape(plan.shape)
        samples = 1 if plan.batch_factors is None else len(plan.batch_factors)
        parts = np.zeros((samples, SKETCH_SIZE))
        for segment in plan.segments:
            row = 0
            block_rows = max(1, min(BLOCK_ROWS, BLOCK_ELEMENTS // segment.inner))
            for run in contiguous_runs(shaped if segment.where is None else shaped[segment.where]):
                for start in range(0, run.size, block_rows * segment.inner):
                    words = run[start : start + block_rows * segment.inner]
                    block, part = self._block_products(words, segment, row, storage)
                    moments = _combined(moments, block)
                    parts[segment.sample] += part
                    row += words.size // segment.inner
        if plan.batch_factors is None:
            return moments, parts[0], None
        return moments, _vecdot(parts, plan.batch_factors, axis=0), parts

    def _block_products(
        self, words: Array, segment: FoldSegment, row: int, storage: Storage
    ) -> tuple[_ValueBlock, Doubles]:
        rows = words.size // segment.inner
        weights = segment.weights(row, row + rows)
        if self.kernel is not None and _pays(storage, segment.inner, rows):
            bound = self.kernel.bind(
                storage.kernel_kind, (1, 1, rows), segment.matrix, weights, None, storage.table
            )
            if bound.look(words.ctypes.data, self._workspace):
                numbers, sketch = self._workspace.numbers()
                nan, posinf, neginf, zero, low, high, mean, _, norm, deviation = numbers[2:]
                finite = words.size - nan - posinf - neginf
                block = _ValueBlock(
                    finite, nan, posinf, neginf, zero, low, high, mean, deviation, norm
                )
                return block, np.array(sketch)
        width = sum_width(rows, segment.inner)
        block, products, scale = self._products(storage.values(words), segment, width)
        return block, _vecdot(products, weights, axis=0) * scale


def _pays(storage: Storage, inner: int, rows: int) -> bool:
    return bool(storage.kernel_kind) and (inner >= _LEAST_COLUMNS or rows <= _MOST_SHORT_ROWS)


def _multiply(values: Floats, matrix: Floats, rows: int, at_once: int) -> Floats:
    inner, out = len(matrix), np.empty((rows, SKETCH_SIZE), matrix.dtype)
    even_rows = rows - rows % at_once
    stacked = values[: even_rows * inner].reshape(-1, at_once, inner)
    np.matmul(stacked, matrix, out=out[:even_rows].reshape(-1, at_once, SKETCH_SIZE))
    if even_rows != rows:
        np.matmul(values[even_rows * inner :].reshape(-1, inner), matrix, out=out[even_rows:])
    return out


def _per_sample(products: Floats, segment: FoldSegment, plan: FoldPlan) -> Doubles:
    assert plan.batch_rows is not None
    shape = (*plan.batch_rows, SKETCH_SIZE)
    weights = segment.weights(0, segment.rows)
    sums: Doubles = _vecdot(products.reshape(shape), weights.reshape(shape), axis=2)
    total: Doubles = sums[0] if len(sums) == 1 else sums.sum(axis=0)
    return total


def _reading(
    plan: FoldPlan, block: _ValueBlock, digest: int, sketch: Doubles, rows: Floats | None
) -> ValueNumbers:
    finite, nan, posinf, neginf, zero, low, high, mean, deviation, norm = block
    std = deviation / math.sqrt(finite - 1) if finite > 1 else math.nan
    samples = None if rows is None else rows.astype(np.float32)
    return ValueNumbers(
        plan.count, digest, nan, posinf, neginf, zero, low, high, mean, std, norm,
        tuple(sketch.tolist()), samples, False,
    )  # fmt: skip


def empty_reading(plan: FoldPlan) -> ValueNumbers:
    """Return the reading of a tensor without elements."""
    rows = None if plan.batch_factors is None else np.zeros(plan.batch_factors.shape)
    none = np.zeros(SKETCH_SIZE)
    return _reading(plan, _NO_VALUES, xxhash.xxh3_64_intdigest(b""), none, rows)


def has_minus_zero(array: Array, storage: Storage) -> bool:
    """Return whether a stored word is -0, or may be one where to normalize costs no more."""
    size = storage.dtype.itemsize
    if size == 1:
        return True  # a table normalizes 8-bit floats at no cost worth a look
    words = np.dtype(f"<i{size}")
    for run in contiguous_runs(array):
        # -0 is the smallest signed integer of its size
        if int(np.minimum.reduce(run.view(words))) == np.iinfo(words).min:
            return True
    return False


def hash_words(array: Array, storage: Storage | None = None) -> int:
    """Return xxh3 of the words in row-major order, normalized if a storage is given."""
    state: Any = xxhash.xxh3_64()
    for run in contiguous_runs(array):
        for start in range(0, run.size, BLOCK_ELEMENTS):
            part = run[start : start + BLOCK_ELEMENTS]
            state.update(storage.normalize(part) if storage and storage.normalize else part)
    return int(state.intdigest())
