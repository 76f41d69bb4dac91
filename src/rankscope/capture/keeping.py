"""The bytes of full tensors as a safetensors file holds them: row-major, seen by nobody.

A contiguous CPU tensor gives its own memory, any other is brought into order a few MB at a time.
An accelerator is never waited for. On the caller's stream the tensor is copied into memory of our
own: what arrives is the value at the call. From there a side stream copies it into a ring of pinned
host memory; `arrived` gives what has passed its event. Nothing in a hook synchronizes.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rankscope.capture.accelerator import Accelerator, HostCopy
from rankscope.capture.dtypestorage import memory_type, storage_of_digested, stored_words
from rankscope.capture.fold import BLOCK_ELEMENTS, contiguous_runs
from rankscope.capture.torch_internals.tensors import invisible_operations
from rankscope.record.value import STORED_TYPES, ValueMeta

PIECE_BYTES: Final = BLOCK_ELEMENTS * 8  # the largest piece that is copied
_MOST_DIMS: Final = 64
_NOTHING: Final = np.empty(0, np.uint8)
_bytes_at: Final[Any] = np.frombuffer
ByteArray = npt.NDArray[np.uint8]


def why_not_stored(meta: ValueMeta, *, can_read: bool) -> str | None:
    """Return why the bytes of a value cannot be stored, None if they can; `can_read`: host or
    accelerator may read its memory."""
    if not can_read:
        return meta.note or "it cannot be read"
    if meta.dtype not in STORED_TYPES:
        return f"safetensors knows no {meta.dtype}"
    if len(meta.shape) > _MOST_DIMS:
        return f"it has more than {_MOST_DIMS} dims"
    return None


def own_bytes(tensor: torch.Tensor) -> ByteArray | None:
    """Return a strided CPU tensor's memory if it is in row-major order, else None. The result keeps
    nothing alive: use it while the tensor exists."""
    if not tensor.is_contiguous() or tensor.is_neg():
        return None
    if tensor.is_complex() and tensor.is_conj():
        return None
    if not tensor.numel():
        return _NOTHING
    storage = storage_of_digested(tensor.dtype)
    memory = memory_type(tensor.numel(), storage)
    data: ByteArray = _bytes_at(memory.from_address(tensor.data_ptr()), np.uint8)
    return data


def byte_pieces(tensor: torch.Tensor) -> Iterator[ByteArray]:
    """Yield copies of a non-empty strided CPU tensor's bytes in row-major order, PIECE_BYTES at a
    time. Later writes to the tensor do not change them."""
    storage = storage_of_digested(tensor.dtype)
    is_negative = tensor.is_neg()
    is_conjugate = tensor.is_complex() and tensor.is_conj()
    words = stored_words(tensor, storage)
    for run in contiguous_runs(words):
        is_own = np.may_share_memory(run, words)
        for start in range(0, run.size, BLOCK_ELEMENTS):
            part = run[start : start + BLOCK_ELEMENTS]
            if is_own:
                part = part.copy()
            if is_negative:
                part = np.negative(part)
            if is_conjugate:
                np.negative(part[1::2], out=part[1::2])
            yield part.view(np.uint8)


_ALIGNMENT: Final = 64


class _TensorInTransfer(NamedTuple):
    """One tensor on its way: its place in the ring, and its source, kept until the copy is done."""

    ticket: int
    start: int
    stop: int
    nbytes: int
    source: torch.Tensor
    copy: HostCopy


class DeviceStaging:
    """Carries tensors of one device to the host. For one thread at a time."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        """Hold at most `limit_bytes`, in the ring (made with the first tensor) and on the
        device."""
        self._device = device
        self._accelerator = Accelerator(device)
        self._limit_bytes = limit_bytes - limit_bytes % _ALIGNMENT
        self._flights: deque[_TensorInTransfer] = deque()
        self._head = 0
        """Begin of the ring's free part, which ends at the oldest flight."""
        self._next_ticket = 0
        self._ring: torch.Tensor | None = None
        self._side: Any = None
        self.failure = ""

    @property
    def held_bytes(self) -> int:
        """Bytes of tensors on their way."""
        return sum(flight.stop - flight.start for flight in self._flights)

    def is_capturing(self) -> bool:
        """True while a CUDA graph is captured: nothing is staged then."""
        return self._accelerator.is_capturing()

    def stage(self, local: torch.Tensor) -> int | None:
        """Enqueue the copy of a tensor as it is now, on the current stream. Return the ticket for
        `arrived`; None without room or memory for the copy, once the device failed, and while a
        CUDA graph is captured: the copy would become part of it."""
        if self.failure or self.is_capturing():
            return None
        nbytes = local.numel() * local.element_size()
        place = self._place_for(max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT))
        if place is None:
            return None
        try:
            with invisible_operations():
                if self._ring is None:
                    self._ring = self._accelerator.host_memory(self._limit_bytes, torch.uint8)
                # a copy on the device first: the program may write to its tensor before the copy to
                # the host has run
                source = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                if nbytes:
                    # a copy also resolves conjugate and negative bits
                    source.view(local.dtype).view(local.shape).copy_(local.detach())
                copy = self._send(source, self._ring[place[0] : place[0] + nbytes])
        except RuntimeError:  # out of memory there or here: the program needs it more than we do
            if self._ring is None:
                self._limit_bytes = 0  # and none to pin: do not try again
            return None
        self._next_ticket += 1
        self._flights.append(_TensorInTransfer(self._next_ticket, *place, nbytes, source, copy))
        self._head = place[1]
        return self._next_ticket

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[int, ByteArray]]:
        """Yield (ticket, bytes) of every tensor that has arrived, in staging order. The bytes are
        valid until the next pair. `wait` for the device at the end of a trace only."""
        if self.is_capturing():
            return
        while self._flights and self._is_there(self._flights[0].copy, wait=wait):
            flight = self._flights[0]
            try:
                yield flight.ticket, self._bytes(flight)
            finally:
                # behind the yield: the place in the ring is free once the caller has stored the
                # bytes
                self._flights.popleft()

    def _is_there(self, copy: HostCopy, *, wait: bool) -> bool:
        """True if a copy has arrived; gives up all copies in flight if the device failed."""
        try:
            if wait:
                copy.wait()
            return wait or copy.is_done()
        except (RuntimeError, TimeoutError) as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._flights.clear()
            return False

    def close(self) -> None:
        """Let go of the ring: no tensor of ours is alive when the interpreter ends."""
        self._flights.clear()
        self._ring = self._side = None

    def _place_for(self, size: int) -> tuple[int, int] | None:
        if not self._flights:
            return (0, size) if size <= self._limit_bytes else None
        tail = self._flights[0].start
        # the ring is free from the head to its end and from 0 to the tail, else between the two
        if self._head > tail:
            if self._head + size <= self._limit_bytes:
                return self._head, self._head + size
            return (0, size) if size <= tail else None
        return (self._head, self._head + size) if self._head + size <= tail else None

    def _bytes(self, flight: _TensorInTransfer) -> ByteArray:
        if not flight.nbytes:
            return np.empty(0, np.uint8)
        assert self._ring is not None  # a flight has a place in it
        address = self._ring.data_ptr() + flight.start
        memory: Any = (ctypes.c_char * flight.nbytes).from_address(address)
        data: ByteArray = np.frombuffer(memory, np.uint8)
        return data

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> HostCopy:
        if self._side is None:
            self._side = self._accelerator.new_stream()
        # on a stream of its own: the copy to the host must not hold up what the program enqueues
        # next
        self._accelerator.follow_current(self._side)
        return self._accelerator.copy_to_host(source, target, self._side)
