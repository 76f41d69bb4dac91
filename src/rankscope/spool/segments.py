"""One mapped file of a stream: made whole, then filled cell by cell, one write at a time.

A segment is preallocated under another name and renamed into place: whoever sees it sees its full
size, and no page of it can fail to exist later (a sparse map on a full disk kills the process).

CRC-32 goes on from where the header left it, so the crc of each possible header is computed once; a
cell is then one crc over its payload and one packing into the map. The first cell is written last.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from binascii import crc32
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError
from rankscope.run.files import OwnFile, free_bytes, leave_mapping, map_file
from rankscope.run.folders import segment_indexes, segment_path
from rankscope.spool.recordformat import CELL_BYTES, FIRST, PAYLOAD_BYTES, RecordKind

Token = tuple[int]
"""Identity of the thread; every attempt makes a new tuple, so that attempts differ by identity."""

_PATIENCE_S: Final = 1.0
"""A thread gives up after this wait for another thread's write, which may wait for it in turn."""


class WriteLock:
    """Whoever has put its token into `holder` writes::

        token = (get_ident(),)
        try:
            if holder.setdefault(0, token) is not token and not lock.wait(token):
                return  # nested in a write of this thread, or another one takes too long
            ...
        finally:
            if 0 in holder and holder[0] is token:
                del holder[0]

    Python runs signal handlers, and raises what another thread puts into this one, only at calls
    and at jumps that are taken. An exception there finds the token either not in `holder`, or in it
    and inside `try`; between the comparison and `del` there is no such place. With
    `threading.Lock` there would be: after `acquire()` returned, and (Python 3.14) after `with` took
    it. That one would also stop a signal handler, or a finalizer, that writes inside a write.
    """

    __slots__ = ("holder",)

    def __init__(self) -> None:
        self.holder: dict[int, Token] = {}

    def wait(self, token: Token) -> bool:
        """Take the lock after another thread's write; False inside a write of this very thread,
        interrupted by a signal handler or a finalizer, and if another thread takes too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while (owner := self.holder.setdefault(0, token)) is not token:
            # this thread owns it: the write that was interrupted goes on only when this returns
            if owner[0] == token[0] or time.monotonic() > deadline:
                return False
            # gives up the GIL, which the other writer needs to come to its end
            time.sleep(0)
        return True


class Segment:
    """A mapped segment and how far it is filled. The writer alone moves `at`."""

    __slots__ = (
        "_identity", "address", "at", "data_end", "end", "index", "map", "observed_bytes", "path",
    )  # fmt: skip

    def __init__(self, folder: Path, index: int, size_bytes: int) -> None:
        """Make, preallocate and map segment `index`. Raises OSError without space or permission, or
        if the name is taken."""
        self.index = index
        self.path = segment_path(folder, index)
        self.at = 0
        self.observed_bytes = 0
        """Bytes that were handed to the observers."""
        self.end = size_bytes
        self.data_end = 0
        """Data records may be written up to here; 0 sends every write through the slow path."""
        draft = self.path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(draft, flags, 0o600)
        try:
            # a sparse file that is mapped kills the process with SIGBUS once the disk is full
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._identity = OwnFile(descriptor).identity
            self.map = map_file(descriptor, size_bytes)
            self.address = np.frombuffer(self.map, np.uint8).ctypes.data
            if hasattr(mmap, "MADV_RANDOM"):
                # Pages come as they are written: else the first write waits for all that the
                # system reads ahead on this disk, megabytes, and most of them are never used.
                with contextlib.suppress(OSError):
                    self.map.madvise(mmap.MADV_RANDOM)
            # renamed when it is whole: a reader takes the size of a segment for granted
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


_CELL: Final = struct.Struct("<I4s56s")
_HEAD: Final = struct.Struct("<BBH")
QUAD: Final = struct.Struct("<56s56s56s56s")
pack_cell = _CELL.pack_into
_pack_three = struct.Struct("<I4s56sI4s56sI4s56s").pack_into


def _head(kind: int, count: int, number: int) -> tuple[bytes, int]:
    head = _HEAD.pack(kind, FIRST if number == 0 else 0, count - 1 - number)
    return head, crc32(head)


_SLOW: Final = (RecordKind.STEP, RecordKind.GAP, RecordKind.END, RecordKind.FILLER)
SINGLE: Final = tuple(
    None if kind == 0 or kind in _SLOW else _head(kind, 1, 0) for kind in range(max(RecordKind) + 1)
)
FOUR: Final = tuple(
    tuple(_head(kind, 4, number) for number in range(4)) for kind in range(max(RecordKind) + 1)
)
_HEADS: Final[dict[tuple[int, int], list[tuple[bytes, int]]]] = {}
_HEADS_KEPT: Final = 256  # the record sizes seen most


class Closed:
    """Stands for the segment of a closed stream: every write goes the slow way and is refused."""

    address = 0
    at = 0
    data_end = 0
    end = 0
    map = bytearray()


CLOSED: Final = Closed()


def put_four(
    segment: Segment | Closed, at: int, heads: tuple[tuple[bytes, int], ...], payload: bytes
) -> None:
    """As `put` for a record with a whole digest, the second hottest: unrolled."""
    first, second, third, fourth = QUAD.unpack(payload)
    (head0, crc0), (head1, crc1), (head2, crc2), (head3, crc3) = heads
    mapped = segment.map
    _pack_three(
        mapped,
        at + CELL_BYTES,
        crc32(second, crc1), head1, second,
        crc32(third, crc2), head2, third,
        crc32(fourth, crc3), head3, fourth,
    )  # fmt: skip
    pack_cell(mapped, at, crc32(first, crc0), head0, first)
    segment.at = at + 4 * CELL_BYTES


def put(segment: Segment | Closed, kind: int, payload: bytes) -> None:
    """Write a record that fits: its following cells, then its first one; then move the end."""
    count = -(-len(payload) // PAYLOAD_BYTES) or 1
    heads = _HEADS.get((kind, count))
    if heads is None:
        heads = [_head(kind, count, number) for number in range(count)]
        # sizes of definitions are many and each is rare: only the common ones are worth a place
        if count <= 64 and len(_HEADS) < _HEADS_KEPT:
            _HEADS[kind, count] = heads
    # `at` moves last: an exception in between leaves the committed end where it was
    mapped, start = segment.map, segment.at
    if len(payload) < count * PAYLOAD_BYTES:
        payload = payload.ljust(count * PAYLOAD_BYTES, b"\0")
    at, cut = start + CELL_BYTES, PAYLOAD_BYTES
    for head, crc in heads[1:]:
        part = payload[cut : cut + PAYLOAD_BYTES]
        pack_cell(mapped, at, crc32(part, crc), head, part)
        at += CELL_BYTES
        cut += PAYLOAD_BYTES
    # the first cell last: readers take a record for committed once that one is valid
    head, crc = heads[0]
    part = payload[:PAYLOAD_BYTES]
    pack_cell(mapped, start, crc32(part, crc), head, part)
    segment.at = at


def whole_record(segment: Segment | Closed) -> int:
    """Return the number of cells of the record that lies whole at the committed end, 0 for none."""
    at, mapped = segment.at, segment.map
    if at >= segment.end:
        return 0
    stored, head, _ = _CELL.unpack_from(mapped, at)
    kind, flags, following = _HEAD.unpack(head)
    # a zero is unwritten space; anything but the first flag is the rest of some earlier record
    if kind == 0 or flags != FIRST or at + (following + 1) * CELL_BYTES > segment.end:
        return 0
    for number in range(following + 1):
        stored, head, payload = _CELL.unpack_from(mapped, at + number * CELL_BYTES)
        expected, crc = _head(kind, following + 1, number)
        if head != expected or stored != crc32(payload, crc):
            return 0
    return int(following) + 1
