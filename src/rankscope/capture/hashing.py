"""The hash of stored words in row-major order, with one zero and one NaN where asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from rankscope.capture.dtypestorage import Array, Storage
from rankscope.capture.fold import BLOCK_ELEMENTS, contiguous_runs


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
    """Return xxh3 of the words in row-major order, normalized where a storage is given."""
    state: Any = xxhash.xxh3_64()
    for run in contiguous_runs(array):
        for start in range(0, run.size, BLOCK_ELEMENTS):
            part = run[start : start + BLOCK_ELEMENTS]
            state.update(
                storage.normalize(part) if storage is not None and storage.normalize else part
            )
    return int(state.intdigest())
