"""The digest of accelerator tensors, without ever waiting for the accelerator.

Each value becomes a row of numbers in a buffer on the device, computed on the caller's stream: by a
fused kernel where one lies compiled (`fusedforms`), else by torch operations (`operations`). A
flush copies the rows to pinned memory without blocking; `collect` gives the readings whose event
has passed. Nothing here synchronizes; only `collect(wait=True)`, at the end of the trace, waits.

A kernel is not believed on a machine where it never ran: the first value of each is read by torch
operations as well, and where the two disagree its readings are thrown away.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from rankscope.capture.accelerator import Accelerator, HostCopy
from rankscope.capture.device.fusedcache import ReadVariant
from rankscope.capture.device.fusedforms import FusedForm, FusedReader
from rankscope.capture.device.operations import (
    OperationsForm,
    agree,
    make_operations_form,
    reading_of_row,
    row_size,
)
from rankscope.capture.dtypestorage import Storage, storage_of_digested
from rankscope.capture.fold import FoldPlan, make_plan
from rankscope.capture.reading import ValueNumbers
from rankscope.capture.torch_internals.tensors import invisible, invisible_operations
from rankscope.layout.placement import Ranges

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
        `collect`; None once the device failed, and while a CUDA graph is captured, of which the
        work would become part."""
        if self.failure or self._accelerator.is_capturing():
            return None
        with invisible():
            if local.is_conj() or local.is_neg():  # bits that a read of the memory does not see
                with invisible_operations():
                    local = local.detach().resolve_conj().resolve_neg()
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
            with self._accelerator.chosen():
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
                with invisible_operations(), self._accelerator.chosen():
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
        self._flights.append(_RowsInTransfer(buffer.tickets, host, copy, rows))
