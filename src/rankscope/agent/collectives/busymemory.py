"""The memory that collectives are still writing: not to be read before the program waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch


class InFlight:
    """Counts by storage; whoever adds a tensor keeps it alive until it is taken away again."""

    def __init__(self) -> None:
        self._writers: Counter[int | None] = Counter()
        """By storage; None stands for all memory without one."""

    def has(self, tensor: torch.Tensor) -> bool:
        """True where a collective may still write what a plain tensor shows."""
        if not self._writers:
            return False
        memory = memory_of(tensor)
        return memory is not None and memory in self._writers

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note that a collective is going to write these."""
        self._writers.update(map(memory_of, tensors))

    def remove(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note that it has."""
        for memory in map(memory_of, tensors):
            self._writers[memory] -= 1
            if self._writers[memory] <= 0:
                del self._writers[memory]


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return what stands for the storage behind a tensor while that lives; None without one."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # nested, functorch: they have none
        return None


def overlaps(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """True where one of the tensors lies among the elements of one of the others."""
    spans = [_span(other) for other in others]
    for memory, first, end in map(_span, tensors):
        if memory is not None and any(memory == m and first < e and f < end for m, f, e in spans):
            return True
    return False


def _span(tensor: torch.Tensor) -> tuple[int | None, int, int]:
    """Return the storage of a tensor, and its first byte there and the one behind its last."""
    memory, size = memory_of(tensor), tensor.element_size()
    if memory is None or not tensor.numel():
        return None, 0, 0
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride()))
    return memory, first * size, (last + 1) * size
