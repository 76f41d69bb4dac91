"""Pieces of files that others append to, none of which is followed through a link."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["piece_of"]


def piece_of(path: Path, offset: int, size: int) -> bytes:
    """Return at most `size` bytes of a file from `offset` on, fewer at its end.

    Raises:
        OSError: it cannot be read, or is a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)
