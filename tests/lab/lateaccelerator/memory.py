"""Memory of the device: addresses that the host cannot read, and blocks used again as CUDA's are.

An address of the device lies in a range that is mapped without any right: to read or to write it
ends the process, as reading a GPU's memory does. The numbers lie elsewhere, in host memory that
entries of queues see through `on_host`. New memory is poison.

A block that is freed goes to the next tensor of its size on *its* stream, at once, also while the
entries that use it still wait: behind them in one stream that is right. Whoever uses it on another
stream has to keep it, or to say so with `record_stream`.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from tests.lab.lateaccelerator.streams import Stream, current_stream

__all__ = ["POISON", "allocate", "block_of", "is_pinned", "on_host", "pinned"]

POISON: Final = 0xFF
"""Every byte of memory nobody has written: NaN for floats, -1 for integers."""
_GRAIN: Final = 512
_SPAN_BYTES: Final = 1 << 40
_LATE: Final = 12  # kDLExtDev: torch's privateuse1
_HOST: Final = 1
_MOST_TENSORS: Final = 1 << 16
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set = torch.ops.aten.set_.source_Storage_storage_offset
_empty_strided = torch.ops.aten.empty_strided.default


@dataclass(eq=False, slots=True)
class Block:
    """One piece of memory."""

    address: int
    nbytes: int
    stream: Stream | None
    """For whose tensors it is; None for pinned host memory."""
    host: torch.Tensor
    """The bytes."""
    others: set[Stream] = field(default_factory=set)
    """Streams that use it as well, by `record_stream`."""
    views: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """The bytes as other dtypes."""


class _Capsules:
    """Tensors around an address, by DLPack: the way that tells when the memory is free again.

    torch calls the deleter of a capsule from any thread, also while a Python exception is on its
    way, so no Python function can be one. `pthread_spin_unlock` is: it writes one word where the
    capsule begins. There the address stands, which torch has read by then; where it is no longer
    what was written, the tensor is gone.
    """

    def __init__(self) -> None:
        self._capsules = np.zeros((_MOST_TENSORS, 8), np.uint64)
        """Data, device, ndim with dtype, shape, strides, offset, context, deleter of each."""
        self._addresses = np.zeros(_MOST_TENSORS, np.uint64)
        self._sizes = np.ones(_MOST_TENSORS, np.int64)
        self._stride = np.ones(1, np.int64)
        self._unused = list(range(_MOST_TENSORS - 1, -1, -1))
        self._used = 0
        """Rows that have been in use."""
        self._deleter = ctypes.cast(ctypes.CDLL(None).pthread_spin_unlock, ctypes.c_void_p).value
        self._new: Any = ctypes.pythonapi.PyCapsule_New
        self._new.restype = ctypes.py_object
        self._new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    def bytes_at(self, address: int, nbytes: int, device_type: int) -> torch.Tensor:
        """Return a flat uint8 tensor."""
        row = self._unused.pop()
        self._used = max(self._used, row + 1)
        self._sizes[row], self._addresses[row] = nbytes, address
        uint8_in_one_dim = 1 | 1 << 32 | 8 << 40 | 1 << 48
        self._capsules[row] = (
            address, device_type, uint8_in_one_dim, self._sizes[row:].ctypes.data,
            self._stride.ctypes.data, 0, 0, self._deleter,
        )  # fmt: skip
        place = self._capsules.ctypes.data + 64 * row
        return torch._C._from_dlpack(self._new(place, b"dltensor", None))

    def freed(self) -> list[int]:
        """Return the addresses that no tensor shows any longer, once each."""
        now, before = self._capsules[: self._used, 0], self._addresses[: self._used]
        rows = np.flatnonzero(now != before).tolist()
        found = self._addresses[rows].tolist()
        self._capsules[rows, 0] = self._addresses[rows] = 0
        self._unused.extend(rows)
        return found


class _Memory:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.capsules = _Capsules()
        self.blocks: dict[int, Block] = {}
        self.free: dict[tuple[Stream | None, int], list[Block]] = defaultdict(list)
        self.limbo: list[tuple[Block, list[tuple[Stream, int]]]] = []
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        self.next = libc.mmap(None, _SPAN_BYTES, 0, flags, -1, 0) + _GRAIN

    def take(self, nbytes: int, stream: Stream | None) -> torch.Tensor:
        """Return a flat uint8 tensor of a block."""
        with self.lock:
            size = -(-max(nbytes, 1) // _GRAIN) * _GRAIN
            free = self.free[stream, size]
            if not free:
                self._reclaim()
            block = free.pop() if free else self._new_block(size, stream)
            block.nbytes = nbytes
            block.others.clear()
            self.blocks[block.address] = block
            device_type = _HOST if stream is None else _LATE
            return self.capsules.bytes_at(block.address, nbytes, device_type)

    def _new_block(self, size: int, stream: Stream | None) -> Block:
        with torch.inference_mode(False):
            host = torch.ops.aten.full.default(
                [size], POISON, dtype=torch.uint8, device=torch.device("cpu")
            )
        if stream is None:
            return Block(host.data_ptr(), size, None, host)
        address, self.next = self.next, self.next + size
        return Block(address, size, stream, host)

    def _reclaim(self) -> None:
        for address in self.capsules.freed():
            block = self.blocks.pop(address)
            used = [(s, s.enqueued) for s in block.others if s is not block.stream]
            self.limbo.append((block, used))
        waiting = []
        for block, used in self.limbo:
            if all(stream.executed >= position for stream, position in used):
                size = block.host.numel()
                self.free[block.stream, size].append(block)
            else:
                waiting.append((block, used))
        self.limbo = waiting


_memory = _Memory()


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the device in new memory, of the current stream."""
    flat = _memory.take(_span(size, stride) * dtype.itemsize, current_stream())
    made = torch._C._acc.create_empty_tensor((0,), dtype)
    return _set.redispatch(_CPU, made, flat.untyped_storage(), 0, size, stride)


def pinned(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a host tensor in memory that the device writes to late."""
    flat = _memory.take(_span(size, stride) * dtype.itemsize, None)
    made = _empty_strided([0], [1], dtype=dtype, device=torch.device("cpu"))
    return _set(made, flat.untyped_storage(), 0, size, stride)


def is_pinned(tensor: torch.Tensor) -> bool:
    """True for memory of `pinned`."""
    block = _memory.blocks.get(tensor.untyped_storage().data_ptr())
    return block is not None and block.stream is None


def block_of(tensor: torch.Tensor) -> Block:
    """Return the block in which a tensor of the device lies."""
    return _memory.blocks[tensor.untyped_storage().data_ptr()]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements of a tensor of the device, for an entry of a queue."""
    block, dtype = _memory.blocks[tensor.untyped_storage().data_ptr()], tensor.dtype
    view = block.views.get(dtype)
    if view is None:
        view = block.views[dtype] = block.host.view(dtype)
    made = view.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        made = torch._conj(made)
    return torch._neg_view(made) if tensor.is_neg() else made


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
