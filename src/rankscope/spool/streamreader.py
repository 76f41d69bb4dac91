"""The read side: the committed records of a stream, while it is written and freed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.record.ranks import EndReason
from rankscope.run.folders import segment_indexes, segment_path
from rankscope.spool.recordcolumns import read_ending, records
from rankscope.spool.recordformat import (
    CELL_BYTES,
    END_REASONS,
    HEADER_BYTES,
    STAMP,
    UNKNOWN,
    RecordKind,
    keep_origin,
    kept_origin,
    origin_of,
    record_bytes,
)
from rankscope.spool.validprefix import as_cells, cell_crcs, valid_prefix

_CHUNK = 4 << 20
_FIRST_CHUNK = 128 << 10


class StreamReader:
    """Committed records of a stream folder, while it is written and while segments are freed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open_index = -1
        self._descriptor = -1
        self._segment_bytes = 0
        self._origin = UNKNOWN

    @property
    def segment_bytes(self) -> int:
        """Size of every segment, 0 without one. Raises SpoolError for parts of a cell."""
        if not self._segment_bytes:
            for index in segment_indexes(self.folder):
                try:
                    size = segment_path(self.folder, index).stat().st_size
                except FileNotFoundError:
                    continue
                # all segments have one size: offsets are found by division, so a wrong size would
                # read other records
                if size == 0 or size % CELL_BYTES:
                    raise SpoolError(
                        f"{segment_path(self.folder, index)}: {size} bytes are not a segment; "
                        f"set the file aside and recover from the replica"
                    )
                self._segment_bytes = size
                break
        return self._segment_bytes

    def origin(self) -> int:
        """Return the origin of this stream, UNKNOWN while it is empty. Raises SpoolError if the
        first record cannot be read, or was freed and its origin not kept."""
        if self._origin == UNKNOWN:
            self._origin = kept_origin(self.folder) or origin_of(self.read_from(0, CELL_BYTES))
        return self._origin

    def lowest(self) -> int:
        """First stream offset that has not been freed; 0 while the stream has no segment."""
        indexes = segment_indexes(self.folder)
        return indexes[0] * self.segment_bytes if indexes else 0

    def read_from(self, offset: int, max_bytes: int) -> bytes:
        """Return whole committed records from `offset` on, b"" if there are none yet: at most
        `max_bytes`, more only if the first record is longer; never across a segment's end. Raises
        SpoolError if the segment was freed, or cannot be read."""
        size = self.segment_bytes
        if not size:
            return b""
        index, at = divmod(offset, size)
        if not self._open(index):
            return b""
        # 0 also for a segment that is there and empty: the writer is about to fill it
        first = record_bytes(self._pread(CELL_BYTES, at))
        if not first:
            return b""
        # whole cells, and the first record whole: its length is in its first cell
        size_to_read = min(max(max_bytes - max_bytes % CELL_BYTES, first), size - at)
        chunk = self._pread(size_to_read, at)
        return chunk[: valid_prefix(chunk)]

    def _pread(self, size: int, at: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, at)
        except OSError as error:
            raise SpoolError(f"{self.folder}: cannot be read: {error.strerror}") from error

    def ends_record(self, offset: int) -> bool:
        """True if a whole record ends at `offset`, or if nothing before it exists any more. Raises
        SpoolError if the segment before it cannot be read."""
        if offset <= self.lowest():
            return True
        size = self.segment_bytes
        if not size or offset % CELL_BYTES:
            return False
        index, at = divmod(offset - CELL_BYTES, size)
        if not self._open(index):
            return False
        cell = self._pread(CELL_BYTES, at)
        # no cell follows: the last of its record, so a record ends here
        if len(cell) < CELL_BYTES or cell[4] == 0 or cell[6:8] != bytes(2):
            return False
        return int.from_bytes(cell[:4], "little") == int(cell_crcs(as_cells(cell))[0])

    def committed(self, offset: int | None = None) -> int:
        """Stream offset where the committed records end, walking from `offset` (or the lowest)."""
        end = self.lowest() if offset is None else offset
        for chunk in self.chunks(end):
            end += len(chunk)
        return end

    def end_reason(self, offset: int) -> EndReason | None:
        """How a stream whose last record ends at `offset` ended; None if that is no END record.
        Raises SpoolError if the record was freed or cannot be read."""
        if offset < CELL_BYTES or offset - CELL_BYTES < self.lowest():
            return None  # a segment is freed only once a later one exists, so that was not the last
        last = self.read_from(offset - CELL_BYTES, CELL_BYTES)
        if len(last) != CELL_BYTES or last[4] != RecordKind.END:
            return None
        return read_ending(records(last)).reason or END_REASONS[0]

    def chunks(self, offset: int | None = None, max_bytes: int = _CHUNK) -> Iterator[bytes]:
        """Yield all committed records from `offset` (default: lowest) on, in pieces: small ones
        first, because megabytes of nothing lie behind the last record."""
        at, size = self.lowest() if offset is None else offset, min(_FIRST_CHUNK, max_bytes)
        while chunk := self.read_from(at, size):
            yield chunk
            at, size = at + len(chunk), min(2 * size, max_bytes)

    def free_below(self, offset: int) -> int:
        """Unlink segments that lie wholly below `offset`, never the newest one; return their
        number. Raises SpoolError for a damaged segment, or if the origin of the records is
        unknown."""
        indexes = segment_indexes(self.folder)
        freed = 0
        # never the newest: its rank writes it, or it holds how the stream ended
        for index in indexes[:-1]:
            if (index + 1) * self.segment_bytes > offset:
                break
            if index == 0 and not keep_origin(self.folder, self.origin()):
                break  # the disk is full: asked again with the next acknowledgement
            segment_path(self.folder, index).unlink(missing_ok=True)
            freed += 1
        return freed

    def close(self) -> None:
        """Close the open segment."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = self._open_index = -1

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def is_own(self, index: int) -> bool:
        """False where a segment says that it is another one; older ones say nothing."""
        if not index:
            return True
        with contextlib.suppress(SpoolError, OSError):
            expected = self.origin(), index
            with segment_path(self.folder, index).open("rb") as file:
                cell = file.read(CELL_BYTES)
            if valid_prefix(cell) == CELL_BYTES and cell[4] == RecordKind.FILLER:
                return STAMP.unpack_from(cell, HEADER_BYTES) in ((UNKNOWN, 0), expected)
        return True

    def _open(self, index: int) -> bool:
        if self._open_index == index:
            return True
        # a segment renamed by hand would be taken for the records between its neighbours
        if not self.is_own(index):
            raise SpoolError(
                f"{segment_path(self.folder, index)}: says that it is of another stream, or "
                f"another segment of this one; it was moved or renamed"
            )
        path = segment_path(self.folder, index)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            indexes = segment_indexes(self.folder)
            if indexes and indexes[0] > index:
                raise SpoolError(
                    f"{path}: was freed; the stream begins with segment {indexes[0]} now"
                ) from None
            return False
        except OSError as error:
            raise SpoolError(f"{path}: cannot be opened: {error.strerror}") from error
        self.close()
        self._descriptor, self._open_index = descriptor, index
        return True
