"""The digest of accelerator tensors, without ever waiting for the accelerator.

Each value becomes a row of numbers in a buffer on the device, computed on the caller's stream: by a
fused kernel where one lies compiled (`fusedforms`), else by torch operations, for devices and
dtypes that no kernel serves. A flush copies the rows to pinned memory without blocking; `collect`
gives the readings whose event has passed. Nothing here synchronizes, calls `.item()` or indexes by
a mask; only `collect(wait=True)`, at the end of the trace, waits.

A kernel is not believed on a machine where it never ran: the first value of each is read by torch
operations as well, and where the two disagree its readings are thrown away. The operations are
about 90 a value; each reads the value once more, or something of its size.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rankscope.capture.accelerator import Accelerator, HostCopy
from rankscope.capture.device.fusedcache import ReadVariant
from rankscope.capture.device.fusedforms import FusedForm, FusedReader
from rankscope.capture.device.fusedplan import FIRST, SECOND, SHIFTS, powers
from rankscope.capture.dtypestorage import Storage, storage_of_digested
from rankscope.capture.fold import FoldPlan, FoldSegment, make_plan
from rankscope.capture.measuring import ValueNumbers
from rankscope.capture.torch_internals.tensors import invisible, invisible_operations
from rankscope.layout.placement import Ranges
from rankscope.record.value import SKETCH_SIZE

_CAPACITY: Final = 1 << 15
_MOST_FORMS: Final = 1024
_MOST_TABLE_BYTES: Final = 64 << 20
"""Limit of the tables on the device; beyond it all are made again."""

Tell = Callable[[str], None]


@dataclass(slots=True)
class _DeviceForm:
    """How values of one dtype, shape, strides and layout are read on one stream (the driver's
    handle); the form of torch operations is made on demand. `size`: numbers of a row."""

    plan: FoldPlan
    size: int
    storage: Storage
    stream: int
    fused: FusedForm | None
    operations: OperationsForm | None = None


class _Ticket(NamedTuple):
    """Places of a value's rows: of the fused kernel `variant`, and of its proof if one is due."""

    number: int
    plan: FoldPlan
    start: int
    variant: ReadVariant | None
    proof: int | None


@dataclass(slots=True)
class _RowsInTransfer:
    """Rows on their way to the host; their source is kept until the copy is done."""

    tickets: list[_Ticket]
    host: torch.Tensor
    copy: HostCopy
    source: torch.Tensor


class _Buffer:
    """Rows of one stream that no flush has sent yet."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.rows = torch.empty(capacity, dtype=torch.float64, device=device)
        self.address = 0 if device.type == "meta" else self.rows.data_ptr()
        self.capacity = capacity
        self.used = 0
        self.tickets: list[_Ticket] = []


class DeviceDigester:
    """Reads digests of tensors on one accelerator; on the CPU too, by the same operations. `fused`
    makes forms of fused kernels, if this device has any; `tell` takes their outcome, once."""

    def __init__(
        self,
        device: torch.device,
        batch_dim: int = 0,
        fused: FusedReader | None = None,
        tell: Tell = lambda text: None,
    ) -> None:
        self._device = device
        self._accelerator = Accelerator(device)
        self._batch_dim = batch_dim
        self._fused = fused
        self._tell = tell
        self._forms: dict[object, _DeviceForm] = {}
        self._table_bytes = 0
        self._requested: set[ReadVariant] = set()
        self._distrusted: set[ReadVariant] = set()
        self._buffers: dict[Any, _Buffer] = {}
        self._flights: deque[_RowsInTransfer] = deque()
        self._next_ticket = 0
        self.failure = ""

    def read(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, *, samples: bool
    ) -> int | None:
        """Enqueue the digest of a tensor as it is now, on the current stream. Return the ticket for
        `collect`; None once the device failed, and while a CUDA graph is captured: the work would
        become part of it."""
        if self.failure or self._accelerator.is_capturing():
            return None
        with invisible():
            if local.is_conj() or local.is_neg():  # bits that a read of the memory does not see
                with invisible_operations():
                    local = local.detach().resolve_conj().resolve_neg()
            # the caller's stream: behind what made the value, before whatever overwrites it
            stream = self._accelerator.current_stream()
            # a table is ready behind the work of the stream that made it, and of no other
            key = (local.dtype, local.shape, local.stride(), ranges, samples, stream)
            form = self._forms.get(key) or self._add_form(local, ranges, samples, stream, key)
            # room for the row and for its proof: both have to leave with one flush
            buffer = self._buffer(2 * form.size, stream)
            start, proof = buffer.used, None
            variant = self._fill_fused(form, buffer, local)
            buffer.used += form.size
            if variant is None:
                self._fill(form, buffer, start, local)
            elif variant not in self._requested:
                # once for each kernel: a proof reads the value by some ninety operations
                self._requested.add(variant)
                proof = buffer.used
                buffer.used += form.size
                self._fill(form, buffer, proof, local)
        self._next_ticket += 1
        buffer.tickets.append(_Ticket(self._next_ticket, form.plan, start, variant, proof))
        return self._next_ticket

    def flush(self) -> None:
        """Start copying everything read so far to the host; returns at once. While a graph is
        captured it does nothing: the rows wait for the next flush."""
        if self._accelerator.is_capturing():
            return
        with self._noting_failure(), invisible_operations():
            for stream, buffer in self._buffers.items():
                if buffer.tickets:
                    self._send(stream, buffer)
        self._buffers.clear()
        if self._fused is not None and self._fused.has_news():  # for the next step
            self._forget_forms()

    def collect(self, *, wait: bool = False) -> list[tuple[int, ValueNumbers | None]]:
        """Return (ticket, reading) of every value that has arrived, in reading order; None for an
        unreliable reading. `wait` (at the end of a trace only): flush, and wait for the device."""
        if wait:
            self.flush()
        arrived: list[tuple[int, ValueNumbers | None]] = []
        if self._accelerator.is_capturing():
            return arrived
        with self._noting_failure():
            while self._flights:
                if wait:
                    self._flights[0].copy.wait()
                # in order: a later flight on another stream waits for its turn, so that readings
                # come as they were taken
                elif not self._flights[0].copy.is_done():
                    break
                arrived += self._readings(self._flights.popleft())
        return arrived

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Give up all digests in flight if the device is in error or stands still."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._flights.clear()
            self._buffers.clear()

    def _readings(self, flight: _RowsInTransfer) -> Iterator[tuple[int, ValueNumbers | None]]:
        with invisible_operations():
            numbers = np.array(flight.host.tolist(), dtype=np.float64)
            # the same memory as integers: the hash lies among the numbers, bit for bit
            words = np.array(flight.host.view(torch.int64).tolist(), dtype=np.int64)

        def reading(plan: FoldPlan, start: int) -> ValueNumbers:
            return reading_of_row(plan, numbers[start:], words[start:])

        # all proofs first: readings of a kernel that fails one are not believed, earlier ones
        # included
        for _, plan, start, variant, proof in flight.tickets:
            if proof is not None and not agree(reading(plan, start), reading(plan, proof)):
                self._distrust(variant)
        for number, plan, start, variant, _ in flight.tickets:
            yield number, None if variant in self._distrusted else reading(plan, start)

    def _fill_fused(
        self, form: _DeviceForm, buffer: _Buffer, local: torch.Tensor
    ) -> ReadVariant | None:
        if form.fused is None:
            return None
        row = buffer.address + 8 * buffer.used
        try:
            with self._accelerator.as_current():
                variant = form.fused.fill(row, local.data_ptr(), form.stream)
            if variant not in self._distrusted:
                return variant
        except OSError as error:
            self._tell(f"{error}: torch operations read instead")
        form.fused = None
        return None

    def _fill(self, form: _DeviceForm, buffer: _Buffer, start: int, local: torch.Tensor) -> None:
        with invisible_operations():
            row = buffer.rows[start : start + form.size]
            if not form.plan.count:
                row.zero_()
                return
            if form.operations is None:
                form.operations = make_operations_form(self._accelerator, form.plan, form.storage)
                self._table_bytes += form.operations.held_bytes
            form.operations.fill(row, local)

    def _add_form(
        self,
        local: torch.Tensor,
        ranges: tuple[Ranges, ...] | None,
        samples: bool,
        stream: Any,
        key: object,
    ) -> _DeviceForm:
        storage = storage_of_digested(local.dtype)
        batch_dim = self._batch_dim if samples else None
        plan = make_plan(tuple(local.shape), ranges, batch_dim, storage.is_complex)
        if len(self._forms) >= _MOST_FORMS or self._table_bytes > _MOST_TABLE_BYTES:
            self._forget_forms()
        fused = None
        if self._fused is not None and plan.count:
            try:
                with invisible_operations(), self._accelerator.as_current():
                    fused = self._fused.make_form(local, ranges, plan, storage, stream)
            except OSError as error:
                self._tell(f"{error}: torch operations read instead")
                self._fused = None
        if fused is not None:
            self._table_bytes += fused.held_bytes
        handle = self._accelerator.handle_of(stream)
        form = _DeviceForm(plan, row_size(plan), storage, handle, fused)
        self._forms[key] = form
        return form

    def _forget_forms(self) -> None:
        self._forms.clear()
        self._table_bytes = 0

    def _distrust(self, variant: ReadVariant | None) -> None:
        if variant is not None and variant not in self._distrusted:
            self._distrusted.add(variant)
            self._tell(
                f"the fused kernel {variant.name} gives wrong numbers on this machine: what it "
                f"read is left out, and torch operations read from now on"
            )

    def _buffer(self, size: int, stream: Any) -> _Buffer:
        buffer = self._buffers.get(stream)
        if buffer is not None and buffer.used + size > buffer.capacity:
            with invisible_operations():
                self._send(stream, buffer)
            buffer = None
        if buffer is None:
            with invisible_operations():
                buffer = self._buffers[stream] = _Buffer(self._device, max(_CAPACITY, size))
        return buffer

    def _send(self, stream: Any, buffer: _Buffer) -> None:
        rows = buffer.rows[: buffer.used]
        host = self._accelerator.host_memory(buffer.used, torch.float64)
        copy = self._accelerator.copy_to_host(rows, host, stream)
        # the rows stay referred to until their copy is done: the allocator would hand their memory
        # out again
        self._flights.append(_RowsInTransfer(buffer.tickets, host, copy, rows))


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
        """Enqueue the row of a non-empty value, without synchronizing."""
        memory = local.detach().resolve_conj().resolve_neg()
        if memory.is_complex():
            memory = torch.view_as_real(memory)
        memory = memory.reshape(self.plan.shape)
        # float64 for everything: on a device there is no way to see whether float32 was enough
        # without waiting
        values = memory.to(torch.float64)
        finite = torch.isfinite(values)
        finite_values = torch.where(finite, values, 0.0)
        # the scale is computed on the device, and never asked for: `.item()` would wait
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
    # products of 64-bit words: of the whole value they would take several times its memory
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        words = part.view(_WORDS[size]).to(torch.int64)
        if size < 8:
            # torch widens with the sign: the hash is of unsigned words
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
