"""One mapped file of a stream: made whole, then filled cell by cell.

A segment is preallocated under another name and renamed into place: whoever sees it sees its full
size, and no page of it can fail to exist later (a sparse map on a full disk kills the process).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError
from rankscope.run.diskspace import free_bytes
from rankscope.run.folders import segment_indexes, segment_path
from rankscope.run.ownfile import OwnFile, leave_mapping, map_file
from rankscope.spool.recordformat import CELL_BYTES, FIRST, RecordKind


class Segment:
    """A mapped segment and how far it is filled. The writer alone moves `at`."""

    __slots__ = ("_identity", "at", "data_end", "end", "index", "map", "path", "seen")

    def __init__(self, folder: Path, index: int, size_bytes: int) -> None:
        """Make, preallocate and map segment `index`. Raises OSError where there is no space or
        permission, or the name is taken."""
        self.index = index
        self.path = segment_path(folder, index)
        self.at = 0
        self.seen = 0
        """Bytes that the observers were handed."""
        self.end = size_bytes
        self.data_end = 0
        """Data records may be written up to here; 0 sends every write the slow way."""
        draft = self.path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(draft, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._identity = OwnFile(descriptor).identity
            self.map = map_file(descriptor, size_bytes)
            if hasattr(mmap, "MADV_RANDOM"):
                # Pages come as they are written: else the first write waits for all that the
                # system reads ahead on this disk, megabytes, and most of them are never used.
                with contextlib.suppress(OSError):
                    self.map.madvise(mmap.MADV_RANDOM)
            os.rename(draft, self.path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def count_records(self) -> int:
        """Records committed here, fillers left out."""
        cells = self.cells(0)
        firsts = (cells[:, 5] & FIRST).astype(bool) & (cells[:, 4] != RecordKind.FILLER)
        return int(np.count_nonzero(firsts))

    def cells(self, begin: int) -> npt.NDArray[np.uint8]:
        """Return a view of the cells committed from a byte on, [N, 64]."""
        return np.frombuffer(self.map, np.uint8)[begin : self.at].reshape(-1, CELL_BYTES)

    def exists(self) -> bool:
        """True until somebody frees or moves the file."""
        return self.path.exists()

    def unmap(self) -> None:
        """Let the mapping go once no view of it is left; the file stays."""
        if leave_mapping(self.map, self._identity):
            with contextlib.suppress(BufferError):
                self.map.close()


def first_segment(folder: Path, size_bytes: int) -> Segment:
    """Begin a stream. Raises SpoolError where the folder holds records, or the disk has no room."""
    if segment_indexes(folder):
        raise SpoolError(
            f"{folder}: holds records of an earlier process; a restarted rank needs the "
            f"next incarnation number, or remove the folder"
        )
    try:
        return Segment(folder, 0, size_bytes)
    except OSError as error:
        raise SpoolError(
            f"{folder}: cannot reserve {size_bytes >> 10} KiB for the spool "
            f"({error.strerror}; {free_bytes(folder) >> 10} KiB free); "
            f"choose another disk with --rs-spool or less with --rs-spool-bytes"
        ) from error
