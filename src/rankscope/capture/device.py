"""The digest of accelerator tensors, without ever waiting for the accelerator.

Each value becomes a row of float64 numbers in a buffer on the device, computed by torch operations
on the caller's stream. A flush copies the rows to pinned memory without blocking and records an
event; `collect` gives the readings whose event has passed. Nothing here calls `.item()`, indexes by
a mask or synchronizes; only `collect(wait=True)`, at the end of the trace, waits.

Statistics and sketch mean what `capture.digest` means. The hash cannot be xxh3, which no sequence
of torch operations computes, so it is `mix64`: with w[i] the normalized word of element i as an
unsigned 64-bit number,

    hash = mix(count + sum over i of mix(w[i] + (i + 1) * STEP))        modulo 2**64

Position enters before the mixing, so the hash depends on order. Hashes of different algorithms
never compare; `HASH_ALGORITHM` is what a trace says about a value read here. `mix64` is the same in
numpy.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope.capture.accelerator import Accelerator, HostCopy
from rankscope.capture.elements import Array, storage_of
from rankscope.capture.fold import FoldPlan, FoldSegment, make_plan
from rankscope.capture.invisible import invisible_operations
from rankscope.capture.reading import ValueNumbers
from rankscope.layout.placement import Ranges
from rankscope.record.value import SKETCH_SIZE

__all__ = ["HASH_ALGORITHM", "DeviceDigester", "mix64"]

HASH_ALGORITHM: Final = "mix64"
_STEP: Final = 0x54C5FC0EFB0A29ED
_FIRST: Final = 0x05FE0D58184DD27D
_SECOND: Final = 0xFEAE2DAA5057C593
_SHIFTS: Final = (31, 29, 32)
_BLOCK: Final = 1 << 24
"""Elements hashed at a time: bounds the 64-bit temporaries."""
_NUMBERS: Final = 11
"""finite, nan, +inf, -inf, zero, min, max, mean, deviation, norm, hash: then the sketch."""
_ROW: Final = _NUMBERS + SKETCH_SIZE
_CAPACITY: Final = 1 << 15
_MOST_KINDS: Final = 1024
_NAN_WORDS: Final = {
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8 << 48,
}
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def mix64(words: Array) -> int:
    """Return the `mix64` hash of normalized flat words (-0 is +0, every NaN the same one)."""
    wide = words.view(f"<u{words.dtype.itemsize}").astype(np.uint64)
    position = np.arange(1, wide.size + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        total = _mix_numpy(wide + position * np.uint64(_STEP)).sum(dtype=np.uint64)
        return int(_mix_numpy(np.array([total + np.uint64(wide.size)], dtype=np.uint64))[0])


def _mix_numpy(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(_SHIFTS[0]))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(_SHIFTS[1]))) * np.uint64(_SECOND)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(_SHIFTS[2]))
    return mixed


def _mix_torch(z: torch.Tensor) -> torch.Tensor:
    """Return `_mix_numpy` of int64 words: their products wrap, their shifts are made logical."""
    for shift, factor in zip(_SHIFTS, (_FIRST, _SECOND, 1), strict=True):
        z = z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))
        z = z * _signed(factor)
    return z


@dataclass(frozen=True, slots=True)
class _DeviceFold:
    """One box of a tensor, all its samples together; tables on the device."""

    where: tuple[slice, ...] | None
    """The box; None for the whole tensor."""
    rows: tuple[int, int, int]
    """Rows of the box: (before, samples, after), samples being 1 where they are not kept apart."""
    columns: torch.Tensor
    """[inner, 8] factors of the columns."""
    weights: torch.Tensor
    """[before, samples or 1, after, 8] factors of the rows, those of the batch dim left out."""


@dataclass(frozen=True, slots=True)
class _DeviceForm:
    """What is the same for values of one dtype, shape and layout; tables on the device."""

    plan: FoldPlan
    folds: tuple[_DeviceFold, ...]
    batch: torch.Tensor | None
    size: int
    """Numbers of a row."""


@dataclass(slots=True)
class _RowsInTransfer:
    """Rows on their way to the host."""

    tickets: list[tuple[int, FoldPlan, int]]
    host: torch.Tensor
    copy: HostCopy
    source: torch.Tensor
    """Kept until the copy is done."""


class _Buffer:
    """Rows of one stream that no flush has sent yet."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.rows = torch.empty(capacity, dtype=torch.float64, device=device)
        self.used = 0
        self.tickets: list[tuple[int, FoldPlan, int]] = []


class DeviceDigester:
    """Reads digests of tensors on one accelerator; on the CPU too, by the same operations."""

    def __init__(self, device: torch.device, batch_dim: int = 0) -> None:
        self._device = device
        self._accelerator = Accelerator(device)
        self._batch_dim = batch_dim
        self._kinds: dict[object, _DeviceForm] = {}
        self._buffers: dict[Any, _Buffer] = {}
        """By stream."""
        self._flights: deque[_RowsInTransfer] = deque()
        self._next_ticket = 0
        self.failure = ""
        """Why nothing comes back any more; "" while the device works."""

    def read(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, *, samples: bool
    ) -> int | None:
        """Enqueue the digest of a tensor on this device as it is now, on the current stream.

        Returns:
            The ticket under which `collect` gives the reading; None while a CUDA graph is captured,
            when whatever we enqueued would become part of the graph, and once the device failed.
        """
        if self.failure or self._accelerator.is_capturing():
            return None
        with invisible_operations():
            stream = self._accelerator.current_stream()
            # a table is ready behind the work of the stream that made it, and of no other
            key = (local.dtype, local.shape, ranges, samples, stream)
            kind = self._kinds.get(key) or self._add_kind(local, ranges, samples, key)
            buffer = self._buffer(kind.size, stream)
            row = buffer.rows[buffer.used : buffer.used + kind.size]
            if kind.plan.count:
                _fill(row, local, kind)
            else:
                row.zero_()
        self._next_ticket += 1
        buffer.tickets.append((self._next_ticket, kind.plan, buffer.used))
        buffer.used += kind.size
        return self._next_ticket

    def flush(self) -> None:
        """Start copying everything read so far to the host; returns at once. While a graph is
        captured it does nothing: the rows wait for the next flush.
        """
        if self._accelerator.is_capturing():
            return
        with self._noting_failure(), invisible_operations():
            for stream, buffer in self._buffers.items():
                if buffer.tickets:
                    self._send(stream, buffer)
        self._buffers.clear()

    def collect(self, *, wait: bool = False) -> list[tuple[int, ValueNumbers]]:
        """Return (ticket, reading) of every value that has arrived, in the order they were read.

        Args:
            wait: flush, and wait for the device. Only at the end of a trace.
        """
        if wait:
            self.flush()
        arrived: list[tuple[int, ValueNumbers]] = []
        if self._accelerator.is_capturing():
            return arrived
        with self._noting_failure():
            while self._flights:
                if wait:
                    self._flights[0].copy.wait()
                elif not self._flights[0].copy.is_done():
                    break
                arrived += _readings(self._flights.popleft())
        return arrived

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Give up what is on its way where the device is in error or stands still."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._flights.clear()
            self._buffers.clear()

    def _add_kind(
        self, local: torch.Tensor, ranges: tuple[Ranges, ...] | None, samples: bool, key: object
    ) -> _DeviceForm:
        storage = storage_of(local.dtype)
        if storage is None:
            raise TypeError(
                f"{local.dtype} tensors have no digest: ask capture.describe before reading one"
            )
        batch_dim = (
            self._batch_dim % local.dim()
            if samples and -local.dim() <= self._batch_dim < local.dim()
            else None
        )
        plan = make_plan(tuple(local.shape), ranges, batch_dim, storage.is_complex)
        folds = tuple(self._fold(box, batch_dim, plan) for box in _boxes(plan))
        batch = None if plan.batch_factors is None else self._table(plan.batch_factors)
        count = 0 if plan.batch_factors is None else plan.batch_factors.size
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        kind = self._kinds[key] = _DeviceForm(plan, folds, batch, _ROW + count)
        return kind

    def _fold(self, box: FoldSegment, batch_dim: int | None, plan: FoldPlan) -> _DeviceFold:
        where = box.where
        weights = self._table(box.weights(0, box.rows))
        if plan.batch_factors is None or batch_dim is None:
            rows = weighted = (1, 1, box.rows)
        else:
            before, samples = math.prod(plan.shape[:batch_dim]), len(plan.batch_factors)
            if box.where is None:
                rows = weighted = (before, samples, box.rows // (before * samples))
            else:  # the box of the first sample, of which the others differ in nothing
                after = box.rows // before
                rows, weighted = (before, samples, after), (before, 1, after)
                where = (*box.where[:batch_dim], slice(None), *box.where[batch_dim + 1 :])
        columns = self._table(box.matrix64)
        return _DeviceFold(where, rows, columns, weights.reshape(*weighted, SKETCH_SIZE))

    def _table(self, array: npt.NDArray[np.float64]) -> torch.Tensor:
        memory = bytearray(array.tobytes())
        table = torch.frombuffer(memory, dtype=torch.float64).reshape(-1, SKETCH_SIZE)
        return self._accelerator.to_device(table)

    def _buffer(self, size: int, stream: Any) -> _Buffer:
        buffer = self._buffers.get(stream)
        if buffer is not None and buffer.used + size > buffer.rows.numel():
            self._send(stream, buffer)
            buffer = None
        if buffer is None:
            buffer = self._buffers[stream] = _Buffer(self._device, max(_CAPACITY, size))
        return buffer

    def _send(self, stream: Any, buffer: _Buffer) -> None:
        """Copy the rows of a buffer on the stream that fills them."""
        rows = buffer.rows[: buffer.used]
        host = self._accelerator.host_memory(buffer.used, torch.float64)
        copy = self._accelerator.copy_to_host(rows, host, stream)
        self._flights.append(_RowsInTransfer(buffer.tickets, host, copy, rows))


def _readings(flight: _RowsInTransfer) -> Iterator[tuple[int, ValueNumbers]]:
    """Yield (ticket, reading) of rows that have arrived."""
    with invisible_operations():
        numbers = np.array(flight.host.tolist(), dtype=np.float64)
        words = np.array(flight.host.view(torch.int64).tolist(), dtype=np.int64)
    for ticket, plan, start in flight.tickets:
        yield ticket, _reading(plan, numbers[start:], words[start:])


def _fill(row: torch.Tensor, local: torch.Tensor, kind: _DeviceForm) -> None:
    """Compute one row of numbers. Runs without a synchronizing call."""
    held = local.detach().resolve_conj().resolve_neg()
    if held.is_complex():
        held = torch.view_as_real(held)
    held = held.reshape(kind.plan.shape)
    values = held.to(torch.float64)
    finite = torch.isfinite(values)
    kept = torch.where(finite, values, 0.0)
    largest = kept.abs().amax()
    _, exponent = torch.frexp(largest)
    is_extreme = (largest > 1e150) | ((largest < 1e-150) & (largest > 0))
    scale = torch.ldexp(
        torch.ones_like(largest), torch.where(is_extreme, exponent.clamp(-1020, 1020), 0)
    )
    scaled = kept / scale
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
        _hash(held).view(torch.float64),
    ]
    row[:_NUMBERS].copy_(torch.stack(numbers))
    parts = _parts(scaled, kind) * scale
    if kind.batch is None:
        row[_NUMBERS:_ROW].copy_(parts[0])
    else:
        row[_NUMBERS:_ROW].copy_((parts * kind.batch).sum(0))
        row[_ROW:].copy_(parts.reshape(-1))


def _boxes(plan: FoldPlan) -> list[FoldSegment]:
    """Return what covers one sample of a tensor, or the whole of it where one product can."""
    if plan.whole is not None:
        return [plan.whole]
    return [segment for segment in plan.segments if segment.sample == 0]


def _parts(values: torch.Tensor, kind: _DeviceForm) -> torch.Tensor:
    """Return the [samples or 1, 8] sketches without the batch dim's factors."""
    sums = []
    for fold in kind.folds:
        box = values if fold.where is None else values[fold.where]
        products = _project(box.reshape(-1, len(fold.columns)), fold.columns)
        sums.append((products.reshape(*fold.rows, SKETCH_SIZE) * fold.weights).sum((0, 2)))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _project(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    if torch.are_deterministic_algorithms_enabled():
        # matrix products then raise unless the program has configured a cuBLAS workspace
        return torch.stack([(rows * column).sum(1) for column in columns.T], dim=1)
    return rows @ columns


def _hash(held: torch.Tensor) -> torch.Tensor:
    """Return the mix64 hash as a 0-dim int64 tensor."""
    flat = held.contiguous().reshape(-1)
    size = flat.element_size()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        words = part.view(_WORDS[size]).to(torch.int64)
        if size < 8:
            words = words & ((1 << (8 * size)) - 1)
        words = _normalize(part, words)
        position = torch.arange(
            start + 1, start + 1 + part.numel(), dtype=torch.int64, device=flat.device
        )
        total = total + _mix_torch(words + position * _signed(_STEP)).sum()
    return _mix_torch(total + flat.numel())


def _normalize(part: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    canonical = _NAN_WORDS.get(part.dtype)
    if canonical is not None:
        words = torch.where(part == 0, 0, words)
        return torch.where(part.isnan(), _signed(canonical), words)
    storage = storage_of(part.dtype)
    if storage is not None and storage.normalize is not None:
        table = storage.normalize(np.arange(256, dtype=np.uint8)).tolist()
        return torch.tensor(table, dtype=torch.int64, device="cpu").to(
            part.device, non_blocking=True
        )[words]
    return words


def _reading(
    plan: FoldPlan, numbers: npt.NDArray[np.float64], words: npt.NDArray[np.int64]
) -> ValueNumbers:
    rows = None
    if plan.batch_factors is not None:
        count = len(plan.batch_factors)
        rows = (
            numbers[_ROW : _ROW + count * SKETCH_SIZE]
            .reshape(count, SKETCH_SIZE)
            .astype(np.float32)
        )
    finite, nan, posinf, neginf, zero = (int(n) for n in numbers[:5])
    low, high, mean, deviation, norm = numbers[5:10].tolist()
    if not finite:
        low = high = mean = math.nan
    hashed = int(words[10]) % (1 << 64) if plan.count else mix64(np.empty(0, dtype=np.uint8))
    sketch = tuple(numbers[_NUMBERS:_ROW].tolist())
    std = deviation / math.sqrt(finite - 1) if finite > 1 else math.nan
    norm = norm if finite else 0.0
    return ValueNumbers(
        plan.count,
        hashed,
        nan,
        posinf,
        neginf,
        zero,
        low,
        high,
        mean,
        std,
        norm,
        sketch,
        rows,
        False,
    )
