"""The bytes of a CPU tensor as a safetensors file holds them: row-major, without a torch operation.

A contiguous tensor gives its own memory. Any other is brought into order piece by piece, so that
what is held beside it stays a few MB whatever its size; conjugate and negative bits, which exist
only as flags, are resolved in the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rankscope.capture.dtypestorage import memory_type, storage_of_digested, stored_words
from rankscope.capture.fold import BLOCK_ELEMENTS, contiguous_runs
from rankscope.record.dtypes import STORED_TYPES
from rankscope.record.value import ValueMeta

PIECE_BYTES: Final = BLOCK_ELEMENTS * 8  # the largest piece that is copied
_MOST_DIMS: Final = 64
_NOTHING: Final = np.empty(0, np.uint8)
_bytes_at: Final[Any] = np.frombuffer
ByteArray = npt.NDArray[np.uint8]


def why_not_stored(meta: ValueMeta, *, can_read: bool) -> str | None:
    """Return why the bytes of a value cannot be stored, None where they can; `can_read`: it lies in
    memory that the host or an accelerator may read."""
    if not can_read:
        return meta.note or "it cannot be read"
    if meta.dtype not in STORED_TYPES:
        return f"safetensors knows no {meta.dtype}"
    if len(meta.shape) > _MOST_DIMS:
        return f"it has more than {_MOST_DIMS} dims"
    return None


def own_bytes(tensor: torch.Tensor) -> ByteArray | None:
    """Return a strided CPU tensor's memory where it lies in row-major order, None elsewhere. It
    keeps nothing alive: use it while the tensor is."""
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
    time. What another thread writes into the tensor meanwhile does not reach them."""
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
