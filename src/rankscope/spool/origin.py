"""Whose records these are: a number that tells a stream from another of the same rank and life.

A node that was replaced starts the same rank in the same life again, on a host that cannot know of
the first one. The first record of a stream says which process wrote it, and when: the number is the
hash of that record. It outlives the first segment in a file beside the others.
"""

from __future__ import annotations

import contextlib
import hashlib
from mmap import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError
from rankscope.run.replacing import write_by_rename
from rankscope.spool.recordformat import CELL_BYTES, record_bytes

UNKNOWN = 0
"""Of a stream without a record, or one whose first record is nowhere any more."""
_NAME = "origin"


def first_record(stream: bytes | mmap | npt.NDArray[np.uint8]) -> bytes:
    """Return the cells of the record these bytes begin with, b"" where it is not whole."""
    size = record_bytes(bytes(stream[:CELL_BYTES]))
    record = bytes(stream[:size])
    return record if len(record) == size else b""


def origin_of(stream: bytes | mmap | npt.NDArray[np.uint8]) -> int:
    """Return the origin of a stream that begins with these bytes, whose cells were checked."""
    record = first_record(stream)
    if not record:
        return UNKNOWN
    return int.from_bytes(hashlib.blake2b(record, digest_size=8).digest(), "little") or 1


def origin_text(origin: int) -> str:
    """Return an origin as files and the tree spell it: 16 hexadecimal digits."""
    return f"{origin:016x}"


def keep_origin(folder: Path, origin: int) -> bool:
    """Note the origin before the first segment goes; False where the segment has to stay."""
    with contextlib.suppress(SpoolError):
        if origin != UNKNOWN:
            write_by_rename(folder / _NAME, origin_text(origin))
            return True
    return False


def kept_origin(folder: Path) -> int:
    """Return the origin noted in a stream folder, UNKNOWN where none is."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / _NAME).read_text()[:16], 16)
    return UNKNOWN
