"""Pieces of files that others append to, none of which is followed through a link, and how much of
the disk such files take."""

from __future__ import annotations

import os
from pathlib import Path

_UNIT_BYTES = 512
"""In which `st_blocks` counts, whatever the file system's own blocks are."""


def piece_of(path: Path, offset: int, size: int) -> bytes:
    """Return at most `size` bytes of a file, or raise OSError, for a link or a pipe too."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe may stand there
    descriptor = os.open(path, flags)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)


def bytes_on_disk(status: os.stat_result) -> int:
    """Return what a file takes of the disk: less than its length where it has holes."""
    return min(status.st_size, status.st_blocks * _UNIT_BYTES)
