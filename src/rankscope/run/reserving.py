"""Disk blocks reserved ahead of what is written, without making the file longer.

What a file grows by costs the file system a place for each piece; with blocks already there a write
into the page cache takes a fifth less time (ext4, 512 KB at a time). It is a favour: where the file
system has no such call, or no room for it, files grow as ever.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

__all__ = ["reserve"]

_KEEP_SIZE: Final = 1
"""FALLOC_FL_KEEP_SIZE of linux/falloc.h: the length of the file stays as it is."""
_LEAST_FREE_BYTES: Final = 1 << 30
"""Of a disk with less room nothing is taken before it is needed: others write there too."""


def _find() -> Any:
    """Return the C library's call; not posix_fallocate, which writes into every block where the
    file system cannot do it, and makes the file longer."""
    found = getattr(ctypes.CDLL(None), "fallocate64", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        found.restype = ctypes.c_int
    return found


_fallocate: Final = _find() if os.name == "posix" else None


def reserve(descriptor: int, start: int, nbytes: int) -> bool:
    """Reserve blocks for bytes of a file from `start` on; False where that cannot be done, or where
    less than a GiB is free.

    What is not written in the end is given back by `ftruncate`, also to the length the file has.
    """
    if _fallocate is None:
        return False
    try:
        disk = os.fstatvfs(descriptor)
    except OSError:
        return False
    if disk.f_bavail * disk.f_frsize - nbytes < _LEAST_FREE_BYTES:
        return False
    return bool(_fallocate(descriptor, _KEEP_SIZE, start, nbytes) == 0)
