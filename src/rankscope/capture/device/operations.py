"""The digest by torch operations, for devices and dtypes that no fused kernel serves, and the row
of float64 numbers that both ways compute of one value.

About 90 operations a value; each reads the value once more, or something of its size. Nothing here
calls `.item()`, indexes by a mask or synchronizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope.capture.accelerator import Accelerator
from rankscope.capture.device.fusedplan import FIRST, SECOND, SHIFTS, powers
from rankscope.capture.dtypestorage import Storage
from rankscope.capture.fold import FoldPlan, FoldSegment
from rankscope.capture.reading import ValueNumbers
from rankscope.record.value import SKETCH_SIZE

HASH: Final = 10
"""Index of the hash, whose bits are stored as a number (0 of a value without elements). Before it:
finite, nan, +inf, -inf, zero, min, max, mean, root of the sum of squares about the mean, norm."""
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


def agree(fused: ValueNumbers, reference: ValueNumbers) -> bool:
    """True if two readings of the same value gave the same numbers, up to rounding."""
    slack = _SAME_STATISTICS * reference.l2 + _LEAST
    about = _SAME_STATISTICS * reference.l2 / math.sqrt(max(reference.count, 1)) + _LEAST
    is_close = partial(np.allclose, rtol=_SAME_STATISTICS, equal_nan=True)
    summed = partial(np.allclose, rtol=0, atol=10 * slack, equal_nan=True)
    return bool(
        fused[:6] == reference[:6]
        and is_close(
            (fused.min, fused.max, fused.l2),
            (reference.min, reference.max, reference.l2),
            atol=_LEAST,
        )
        and is_close((fused.mean, fused.std), (reference.mean, reference.std), atol=about)
        and summed(fused.sketch, reference.sketch)
        and (
            fused.samples is reference.samples
            if fused.samples is None or reference.samples is None
            else summed(fused.samples, reference.samples)
        )
    )


_BLOCK: Final = 1 << 24
"""Elements hashed at a time: bounds the 64-bit temporaries."""
_KEYS: Final = 1 << 12
_NAN_WORDS: Final = {
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8 << 48,
}
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class OperationsForm:
    """How values of one dtype, shape and layout are read, with tables on the device: powers of the
    hash's base, one for every _KEYS elements and [_KEYS] within these; [256] normalized words of an
    8-bit float."""

    plan: FoldPlan
    folds: tuple[_DeviceFold, ...]
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    same: torch.Tensor | None

    @property
    def held_bytes(self) -> int:
        """Memory of the tables on the device."""
        folds = sum(fold.columns.nbytes + fold.weights.nbytes for fold in self.folds)
        return folds + self.row_keys.nbytes + self.column_keys.nbytes

    def fill(self, row: torch.Tensor, local: torch.Tensor) -> None:
        """Enqueue the row of a non-empty value (`resultrow`), without synchronizing."""
        memory = local.detach().resolve_conj().resolve_neg()
        if memory.is_complex():
            memory = torch.view_as_real(memory)
        memory = memory.reshape(self.plan.shape)
        values = memory.to(torch.float64)
        finite = torch.isfinite(values)
        finite_values = torch.where(finite, values, 0.0)
        largest = finite_values.abs().amax()
        _, exponent = torch.frexp(largest)
        is_extreme = (largest > 1e150) | ((largest < 1e-150) & (largest > 0))
        scale = torch.ldexp(
            torch.ones_like(largest), torch.where(is_extreme, exponent.clamp(-1020, 1020), 0)
        )
        scaled = finite_values / scale
        number = finite.sum(dtype=torch.float64)
        mean = scaled.sum() / number
        away = torch.where(finite, scaled - mean, 0.0)
        numbers = [
            number,
            values.isnan().sum(dtype=torch.float64),
            (values == math.inf).sum(dtype=torch.float64),
            (values == -math.inf).sum(dtype=torch.float64),
            (values == 0).sum(dtype=torch.float64),
            torch.where(finite, values, math.inf).amin(),
            torch.where(finite, values, -math.inf).amax(),
            mean * scale,
            away.square().sum().sqrt() * scale,
            scaled.square().sum().sqrt() * scale,
            _hash(memory, self).view(torch.float64),
        ]
        row[:SKETCH].copy_(torch.stack(numbers))
        row[SKETCH:].copy_((_parts(scaled, self) * scale).reshape(-1))


def make_operations_form(
    accelerator: Accelerator, plan: FoldPlan, storage: Storage
) -> OperationsForm:
    """Return the form of values of a plan, its tables enqueued on the current stream."""
    folds = tuple(_fold(accelerator, box, plan) for box in _boxes(plan))
    row_keys = _words(accelerator, powers(np.arange(0, plan.count, _KEYS)))
    column_keys = _words(accelerator, powers(np.arange(1, 1 + min(_KEYS, plan.count))))
    normalized = None
    if storage.table is not None and storage.normalize is not None:
        normal = storage.normalize(np.arange(256, dtype=np.uint8))
        normalized = _words(accelerator, normal.astype(np.uint64))
    return OperationsForm(plan, folds, row_keys, column_keys, normalized)


def _words(accelerator: Accelerator, array: npt.NDArray[np.uint64]) -> torch.Tensor:
    return accelerator.to_device(torch.frombuffer(bytearray(array), dtype=torch.int64))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _mix_torch(z: torch.Tensor) -> torch.Tensor:
    """Return `mix64` of int64 words: their products wrap, their shifts are made logical."""
    for shift, factor in zip(SHIFTS, (FIRST, SECOND, 1), strict=True):
        z = z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))
        z = z * _signed(factor)
    return z


@dataclass(frozen=True, slots=True)
class _DeviceFold:
    """One box of a tensor (None: all of it), all its samples together; tables on the device:
    [inner, 8] factors of the columns, [before, samples or 1, after, 8] of the rows without those of
    the batch dim."""

    where: tuple[slice, ...] | None
    rows: tuple[int, int, int]
    """Rows of the box: (before, samples, after), samples being 1 where they are not kept apart."""
    columns: torch.Tensor
    weights: torch.Tensor


def _fold(accelerator: Accelerator, box: FoldSegment, plan: FoldPlan) -> _DeviceFold:
    where, batch_dim = box.where, plan.batch_dim
    weights = _table(accelerator, box.weights(0, box.rows))
    if plan.batch_factors is None or batch_dim is None:
        rows = weighted = (1, 1, box.rows)
    else:
        before, samples = math.prod(plan.shape[:batch_dim]), len(plan.batch_factors)
        if box.where is None:
            rows = weighted = (before, samples, box.rows // (before * samples))
        else:  # the box of the first sample; those of the others are the same
            after = box.rows // before
            rows, weighted = (before, samples, after), (before, 1, after)
            where = (*box.where[:batch_dim], slice(None), *box.where[batch_dim + 1 :])
    columns = _table(accelerator, box.matrix64)
    return _DeviceFold(where, rows, columns, weights.reshape(*weighted, SKETCH_SIZE))


def _table(accelerator: Accelerator, array: npt.NDArray[np.float64]) -> torch.Tensor:
    memory = bytearray(array.tobytes())
    table = torch.frombuffer(memory, dtype=torch.float64).reshape(-1, SKETCH_SIZE)
    return accelerator.to_device(table)


def _boxes(plan: FoldPlan) -> list[FoldSegment]:
    """Return boxes that cover one sample, or the whole tensor if one product can."""
    if plan.whole is not None:
        return [plan.whole]
    return [segment for segment in plan.segments if segment.sample == 0]


def _parts(values: torch.Tensor, form: OperationsForm) -> torch.Tensor:
    """Return the [samples or 1, 8] sketches without the batch dim's factors."""
    sums = []
    for fold in form.folds:
        box = values if fold.where is None else values[fold.where]
        products = _project(box.reshape(-1, len(fold.columns)), fold.columns)
        sums.append((products.reshape(*fold.rows, SKETCH_SIZE) * fold.weights).sum((0, 2)))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _project(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    if torch.are_deterministic_algorithms_enabled():
        # matrix products then raise unless the program has configured a cuBLAS workspace
        return torch.stack([(rows * column).sum(1) for column in columns.T], dim=1)
    return rows @ columns


def _hash(memory: torch.Tensor, form: OperationsForm) -> torch.Tensor:
    flat = memory.contiguous().reshape(-1)
    size = flat.element_size()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        words = part.view(_WORDS[size]).to(torch.int64)
        if size < 8:
            words = words & ((1 << (8 * size)) - 1)
        words = _normalize(part, words, form.same)
        if size >= 4:
            words = words ^ ((words >> (4 * size)) & ((1 << (4 * size)) - 1))
        rows = -(-part.numel() // _KEYS)
        keys = form.row_keys[start // _KEYS :][:rows, None] * form.column_keys
        total = total + (words * keys.reshape(-1)[: part.numel()]).sum()
    return _mix_torch(total + flat.numel())


def _normalize(
    part: torch.Tensor, words: torch.Tensor, normalized: torch.Tensor | None
) -> torch.Tensor:
    if normalized is not None:
        return normalized[words]
    canonical = _NAN_WORDS.get(part.dtype)
    if canonical is None:
        return words
    words = torch.where(part == 0, 0, words)
    return torch.where(part.isnan(), _signed(canonical), words)
