"""Full tensors into chunks: the write side, inside the training process.

A chunk is a safetensors file that is written from front to back: a header region of fixed size is
reserved, the bytes of each tensor follow, and when the chunk is full the header is filled in with
one write. There is no footer and no rename: a chunk that was left unfinished is finished from the
TENSOR records of the spool (`rankscope.spool.chunks.chunkfiles`).

Bytes go from the tensor's memory to the file with `pwrite`: nothing is copied on the way, nothing
is mapped (a full disk is an error here, not a SIGBUS), and once `write` has returned the tensor may
change or be freed. What stands in the chunk is one list; whatever interrupts a write leaves it as
it was, and the next tensor takes the place of the bytes left behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rankscope.errors import ChunkError, ChunkFullError
from rankscope.record.ranks import StreamId
from rankscope.record.value import STORED_TYPES
from rankscope.run.files import OwnFile, above_standard_streams, reserve
from rankscope.run.processes import forget_in_children
from rankscope.spool.chunks.chunkfiles import (
    CHUNK_TEXT_BYTES,
    begun_chunk,
    chunk_folder,
    chunk_path,
    header_json,
    write_header,
)
from rankscope.spool.chunks.safetensors import CHECKSUM_DIGITS, LENGTH_BYTES, entry_text, write_all

CHUNK_BYTES: Final = 256 << 20
CHUNK_TENSORS: Final = 8192
HEADER_BYTES: Final = (1 << 20) - LENGTH_BYTES
"""Header region of a chunk: 8,192 tensors of the usual number of dims. Data begins at a multiple of
a MiB, which the page cache writes in two thirds of the time."""
_LEAST_HEADER_BYTES: Final = 4096
_AHEAD_BYTES: Final = 8 << 20  # reserved on disk beyond what is written
ByteArray = npt.NDArray[np.uint8]
# the stubs do not know that arrays are buffers
_xxh3: Final[Any] = xxhash.xxh3_64


class ChunkEntry(NamedTuple):
    """Where the bytes of one tensor are: place among the chunk's tensors, first byte from the end
    of the header region, xxh3_64 of the stored bytes, its text in the header and the header's end
    with it."""

    reference: int
    chunk: int
    index: int  # type: ignore[assignment]  # nobody looks for an entry as in a tuple
    begin: int
    nbytes: int
    checksum: int
    text: str
    header_end: int

    @property
    def end(self) -> int:
        """Byte behind the last."""
        return self.begin + self.nbytes


class ChunkWriter:
    """Writes the chunks of one stream. For one thread at a time; the caller sees to that."""

    def __init__(
        self,
        trace: Path,
        stream: StreamId,
        *,
        limit_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        chunk_tensors: int = CHUNK_TENSORS,
        header_bytes: int = HEADER_BYTES,
    ) -> None:
        """Prepare to write; nothing is made before the first tensor.

        Args:
            limit_bytes: what all chunks of the stream may occupy on disk.
            chunk_bytes: data of a chunk at most; a larger tensor has a chunk of its own.
            header_bytes: reserved in each chunk; one that would need more ends earlier.
        """
        if header_bytes < _LEAST_HEADER_BYTES or header_bytes % 8:
            raise ValueError(f"a header of {header_bytes} bytes: expected 4096 or more, in eights")
        self._folder = chunk_folder(trace, stream)
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._chunk_bytes = chunk_bytes
        self._chunk_tensors = chunk_tensors
        self._header_bytes = header_bytes
        self._data_start = LENGTH_BYTES + header_bytes
        self._number = 0
        self._file: OwnFile | None = None
        self._reserved_end = 0
        """End of the open chunk's reserved blocks; `sys.maxsize` where none can be reserved."""
        self._entries: list[ChunkEntry] = []
        """Tensors committed in the open chunk: nothing else says where the chunk ends."""
        self._spent_bytes = 0
        self.is_open = True
        """False after `finish`, after trouble, and in a forked child."""
        self.trouble = ""
        forget_in_children(self)

    @property
    def spent_bytes(self) -> int:
        """Bytes on disk so far."""
        return self._spent_bytes + (self._data_start + self._end if self._file is not None else 0)

    @property
    def _end(self) -> int:
        return self._entries[-1].end if self._entries else 0

    @property
    def _header_end(self) -> int:
        return self._entries[-1].header_end if self._entries else CHUNK_TEXT_BYTES

    def write(
        self,
        reference: int,
        dtype: str,
        shape: Sequence[int],
        pieces: Iterable[ByteArray],
        *,
        checksum: int | None = None,
    ) -> ChunkEntry | None:
        """Write the bytes of one tensor behind the last; it belongs to the chunk once committed.

        Args:
            reference: its key, from 1.
            dtype: torch's name; one of `STORED_TYPES`.
            shape: what this rank holds.
            pieces: its bytes in row-major order.
            checksum: xxh3_64 of them, where the caller knows it.

        Returns:
            What to `commit`; None where the writer is over.

        Raises:
            ChunkFullError: it would go beyond the limit; nothing was written.
            ChunkError: the disk refused it. From then on every write returns None.
        """
        if not self.is_open:
            return None
        stored = STORED_TYPES[dtype]
        nbytes = stored.nbytes(shape)
        begin = self._end
        text = entry_text(str(reference), stored.name, shape, begin, begin + nbytes)
        needs_new = self._file is None or self._is_full_for(nbytes, len(text))
        # found before a byte is written: a header that has no room would leave the chunk unfinished
        # for good
        if CHUNK_TEXT_BYTES + len(text) + 1 + CHECKSUM_DIGITS > self._header_bytes:
            raise ValueError(f"a tensor of {len(shape)} dims: its shape does not fit in a header")
        # a new chunk costs its header region too
        more = nbytes + (self._data_start if needs_new else 0)
        if self.spent_bytes + more > self._limit_bytes:
            raise ChunkFullError(
                f"{self._folder}: {nbytes} bytes more are beyond the {self._limit_bytes} that "
                f"this rank may use; raise --rs-tensor-budget, or keep fewer with --rs-tensors"
            )
        try:
            if needs_new:
                self._next_chunk()
                begin = 0
                text = entry_text(str(reference), stored.name, shape, 0, nbytes)
            assert self._file is not None  # made by `_next_chunk`
            # a program that closes all descriptors gives this number to a file of its own: nothing
            # is written to that
            number = self._file.check()
            self._reserve(number, self._data_start + begin + nbytes)
            written, digest = self._write_pieces(number, pieces, self._data_start + begin, checksum)
        except OSError as error:
            raise self._give_up(error) from error
        if written != nbytes:
            raise ValueError(f"{dtype} {list(shape)} takes {nbytes} bytes, {written} were given")
        header_end = self._header_end + len(text) + 1 + CHECKSUM_DIGITS
        index = len(self._entries)
        return ChunkEntry(reference, self._number, index, begin, nbytes, digest, text, header_end)

    def commit(self, entry: ChunkEntry) -> None:
        """Let the chunk hold what was just written."""
        self._entries.append(entry)

    def withdraw(self, entry: ChunkEntry) -> None:
        """Take back the last commit: its place is used again."""
        if self._entries and self._entries[-1] is entry:
            del self._entries[-1]

    def finish(self) -> None:
        """Finish the open chunk and write no more. Does nothing twice, or in a forked child. Raises
        ChunkError where the disk refuses; the chunk can still be finished from the records."""
        if not self.is_open:
            return
        try:
            self._finish_chunk()
        except OSError as error:
            raise self._give_up(error) from error
        self.is_open = False

    def _is_full_for(self, nbytes: int, text_bytes: int) -> bool:
        if not self._entries:
            return False  # alone it may be larger than a chunk, and its header always fits
        text_bytes += 1 + CHECKSUM_DIGITS
        return (
            len(self._entries) >= self._chunk_tensors
            or self._end + nbytes > self._chunk_bytes
            or self._header_end + text_bytes > self._header_bytes
        )

    def _reserve(self, number: int, end: int) -> None:
        """Have blocks on disk for what is written up to `end`, and for some of what follows."""
        start = self._reserved_end
        if end <= start:
            return
        ahead = min(_AHEAD_BYTES, self._limit_bytes - self._spent_bytes - end)
        if not reserve(number, start, end + max(ahead, 0) - start):
            # no blocks to be had on this file system: never asked again for this chunk
            ahead = sys.maxsize
        self._reserved_end = end + max(ahead, 0)

    def _write_pieces(
        self, number: int, pieces: Iterable[ByteArray], at: int, checksum: int | None
    ) -> tuple[int, int]:
        start = at
        state = _xxh3() if checksum is None else None
        for piece in pieces:
            if state is not None:
                state.update(piece)
            # at an offset, not at the file's position: a write that was interrupted leaves nothing
            # to go back to
            write_all(number, piece.data, at)
            at += len(piece)
        return at - start, state.intdigest() if state is not None else checksum or 0

    def _next_chunk(self) -> None:
        self._finish_chunk()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._number += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        path = chunk_path(self._folder, self._number)
        descriptor = above_standard_streams(os.open(path, flags, 0o600))
        is_made = False
        try:
            # locked before the first byte: whoever finishes chunks of dead ranks must not take this
            # one
            _hold(descriptor)
            # all of it now: later there may be no room for it
            begun = begun_chunk(self._stream, self._number, self._header_bytes)
            write_all(descriptor, begun, 0)
            file = OwnFile(descriptor)
            is_made = True
        finally:
            if not is_made:
                os.close(descriptor)
                path.unlink(missing_ok=True)
        self._file = file
        self._reserved_end = self._data_start

    def _finish_chunk(self) -> None:
        """Cut the file behind the last tensor and fill in the header; an empty chunk is removed. If
        the disk refuses, the file stays as far as it got."""
        file = self._file
        if file is None:
            return
        size = self._data_start + self._end
        try:
            descriptor = file.check()
        except OSError:
            self._file, self._entries = None, []
            raise
        try:
            # bytes of a tensor that was not committed go, and blocks reserved ahead
            os.ftruncate(descriptor, size)
            if self._entries:
                self._spent_bytes += size
                checksums = "".join([f"{entry.checksum:016x}" for entry in self._entries])
                texts = [entry.text for entry in self._entries]
                header = header_json(self._stream, self._number, texts, checksums)
                write_header(descriptor, header, self._header_bytes)
            else:
                chunk_path(self._folder, self._number).unlink(missing_ok=True)
        finally:
            self._file = None
            self._entries = []
            os.close(descriptor)

    def _give_up(self, error: OSError) -> ChunkError:
        self.is_open = False
        self.trouble = f"{self._folder}: {error.strerror or error}"
        try:
            self._finish_chunk()
        except OSError as second:
            self.trouble += f"; its chunk {self._number} stays unfinished: {second.strerror}"
        return ChunkError(
            f"{self.trouble}; no more tensors are kept, those stored so far are whole"
        )

    def forget_in_child(self) -> None:
        """Write nothing: the chunks are the parent's."""
        file, self._file = self._file, None
        self.is_open = False
        if file is not None:
            file.close()


def _hold(descriptor: int) -> None:
    """Lock a chunk while it is open, if the file system can, so that no other process finishes it.
    Raises OSError if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
