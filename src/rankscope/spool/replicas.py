"""Replicas in a trace folder: byte-identical copies of streams, what stands for their settled
begin, and their end markers.

    <trace>/spool/rank00003.0.cells      the replica
    <trace>/spool/rank00003.0.json       its end marker, written once the stream has ended
    <trace>/spool/rank00003.0.settled    a head, then whole records: definitions, setup, gaps, and
                                         what belongs to steps that were not written yet

Once its steps were written into the trace, the begin of a replica is settled. The replica keeps its
length, so that every offset in it means what it did. Its settled bytes, all but the first record,
may become a hole at any moment (`free`): readers take the `.settled` file instead of them.

A reader locks the replica (shared) before it asks what is settled, and has it locked while it uses
its bytes; a map has it locked for as long as the map lives. `free` needs the lock for itself, and
frees nothing where it does not get it: the next call does.

`valid_prefix` says how far bytes are whole, valid records: every checksum and every record's shape
is looked at. Nothing there trusts a byte before its cell's crc and its record's shape were checked,
and nothing reads past the first cell that fails: behind it may be a record half written, or damage.

CRC-32 is linear over GF(2), which saves a Python loop over the cells of sound streams. The crc of a
whole block of cells, stored crcs included, is one call of zlib; its right value follows from the
stored crcs alone. Let Z append 64 zero bytes to the input of a crc, s_i be the stored crc of cell
i, and d_i its difference from the crc of 60 zero bytes. The block's crc then differs from that
of a block of all-zero sound cells by

    (Z + 1) (Z^(n-1) d_0 + Z^(n-2) d_1 + ... + d_(n-1))

and the sum in it takes one multiplication by a power of Z per cell, in halves: pairs, pairs of
pairs, and so on. One damaged cell is always found, several are missed with the 2^-32 that a single
cell's own crc misses. Only in a damaged block is each cell checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError, os_errors_as
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.files import punch_hole, read_json_map, replacing, write_by_rename
from rankscope.run.folders import CELLS_SUFFIX, REPLICA_FOLDER, SETTLED_SUFFIX, stream_named
from rankscope.spool.recordformat import (
    CELL_BYTES,
    FIRST,
    MAX_RECORD_CELLS,
    first_record,
    record_bytes,
)

_NUMBERS: Final = struct.Struct("<8sQQQI")
"""Magic with the format's number, settled bytes of the replica, bytes that follow, late records,
crc of the bytes that follow."""
_CRC: Final = struct.Struct("<I")
_HEAD_BYTES: Final = _NUMBERS.size + _CRC.size
_MAGIC: Final = b"rsSETTL1"
_BLOCK: Final = 4096


@dataclass(frozen=True, slots=True)
class SettledPrefix:
    """What stands for the first bytes of a replica: whole records, the stream's first one first."""

    settled_to: int
    """Bytes of the replica that are settled; a record begins behind them."""
    payload: bytes
    late_records: int = 0
    """Records dropped because they came after their step had been written."""

    def __post_init__(self) -> None:
        if self.settled_to % CELL_BYTES or len(self.payload) % CELL_BYTES:
            raise ValueError(f"{len(self.payload)} bytes of {self.settled_to} are not whole cells")
        if len(self.payload) > self.settled_to or bool(self.payload) != bool(self.settled_to):
            raise ValueError(f"{len(self.payload)} bytes cannot stand for {self.settled_to}")

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the stream that were let go."""
        return self.settled_to - len(self.payload)


NOTHING_SETTLED: Final = SettledPrefix(0, b"")


def read_settled(replica: Path) -> SettledPrefix:
    """Return the settled begin of a replica. Raises SpoolError if unreadable or damaged."""
    parts = _read(replica)
    if parts is None:
        return NOTHING_SETTLED
    (settled, size, late, crc), payload = parts
    path = replica.with_suffix(SETTLED_SUFFIX)
    if size != len(payload) or zlib.crc32(payload) != crc:
        raise _damaged(path)
    try:
        return SettledPrefix(settled, payload, late)
    except ValueError as error:
        raise SpoolError(f"{path}: {error}; it is damaged") from error


def settled_to(replica: Path) -> int:
    """Return how many bytes of a replica are settled; raises as `read_settled`."""
    parts = _read(replica, _HEAD_BYTES)
    return 0 if parts is None else parts[0][0]


def _read(replica: Path, most_bytes: int = -1) -> tuple[tuple[int, int, int, int], bytes] | None:
    """Return settled bytes, payload bytes, late records and crc of the payload, and the bytes read
    behind the head; None if nothing is settled."""
    path = replica.with_suffix(SETTLED_SUFFIX)
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpoolError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) >= _HEAD_BYTES:
        magic, *numbers = _NUMBERS.unpack_from(data)
        (head_crc,) = _CRC.unpack_from(data, _NUMBERS.size)
        if magic == _MAGIC and head_crc == zlib.crc32(data[: _NUMBERS.size]):
            settled, size, late, crc = numbers
            return (settled, size, late, crc), data[_HEAD_BYTES:]
    raise _damaged(path)


def _damaged(path: Path) -> SpoolError:
    return SpoolError(
        f"{path}: is damaged, and what it stands for may be gone from the replica beside it: take "
        f"both out of the folder to read what the other ranks recorded"
    )


def write_settled(replica: Path, prefix: SettledPrefix) -> None:
    """Write the prefix, whole or not at all, and sync it: bytes are destroyed after this. Raises
    ValueError if it settles less than before, OSError if it cannot be written, and SpoolError if
    the existing file cannot be read."""
    before = settled_to(replica)
    # what is freed is gone: a shorter prefix would stand for nothing between the two
    if prefix.settled_to < before:
        raise ValueError(f"{replica}: {before} bytes are settled, not {prefix.settled_to}")
    path = replica.with_suffix(SETTLED_SUFFIX)
    payload = prefix.payload
    numbers = _NUMBERS.pack(
        _MAGIC, prefix.settled_to, len(payload), prefix.late_records, zlib.crc32(payload)
    )
    with replacing(path) as file:
        file.write(numbers + _CRC.pack(zlib.crc32(numbers)))
        file.write(payload)


def lock_for_reading(descriptor: int) -> None:
    """Prevent freeing of an open replica until it is closed or unlocked; on file systems without
    locks `free` never frees."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def read_replica(
    replica: Path, end: int | None = None
) -> tuple[npt.NDArray[np.uint8], SettledPrefix]:
    """Return the records of a replica up to `end`, as far as they still exist, and the settled
    prefix: [bytes] from the first record on, mapped, or the prefix's payload and then the rest,
    read. Nothing is freed while that map lives. Raises SpoolError if it cannot be read."""
    with os_errors_as(SpoolError, f"{replica}: cannot be read"), replica.open("rb") as file:
        lock_for_reading(file.fileno())
        prefix = read_settled(replica)
        first = first_record(prefix.payload)
        # the first record is never freed: it proves that file and prefix are of one stream
        if os.pread(file.fileno(), len(first), 0) != first:
            raise SpoolError(f"{replica}: what is settled of it is of another stream")
        if os.fstat(file.fileno()).st_size <= prefix.settled_to:
            return np.frombuffer(prefix.payload, np.uint8), prefix
        # the map has a descriptor of its own of this open file, and with it the lock
        data = np.memmap(file, np.uint8, "r").view(np.ndarray)[prefix.settled_to : end]
        if prefix.settled_to:
            data = np.concatenate([np.frombuffer(prefix.payload, np.uint8), data])
        return data, prefix


def free(replica: Path, end: int) -> bool:
    """Return the settled bytes of a replica up to `end`, except its first record, to the disk.
    False if the file system cannot, or while the replica is being read: the next call frees them
    too. Raises OSError if the replica cannot be opened or the disk fails, and SpoolError if the
    settled prefix cannot be read."""
    # nothing is freed that the file beside the replica does not stand for
    end = min(end, settled_to(replica))
    descriptor = os.open(replica, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        first = record_bytes(os.pread(descriptor, CELL_BYTES, 0))
        # the first record stays: it says whose replica this is
        begin = -(-first // _BLOCK) * _BLOCK
        size = end // _BLOCK * _BLOCK - begin
        if size <= 0:
            return True
        try:
            # readers may be minutes at it, and the run must not wait for them
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return punch_hole(descriptor, begin, size)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """How a stream ended, and how many bytes its rank committed, as its marker says."""

    committed: int
    end: EndReason


def replica_path(out: Path, stream: StreamId) -> Path:
    """Path of a stream's replica in a trace folder."""
    return out / REPLICA_FOLDER / f"{stream.name}{CELLS_SUFFIX}"


def replicated(out: Path) -> dict[StreamId, int]:
    """Streams that have a replica, and its length in bytes."""
    lengths = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(out / REPLICA_FOLDER) as entries:
        for entry in entries:
            stream = stream_named(entry.name.removesuffix(CELLS_SUFFIX))
            if stream is not None and entry.name.endswith(CELLS_SUFFIX):
                lengths[stream] = entry.stat(follow_symlinks=False).st_size
    return lengths


def write_end(replica: Path, end: StreamEnd) -> bool:
    """Write the end marker beside a replica; False if there is one for as many bytes. Raises
    SpoolError if the marker cannot be written."""
    earlier = read_end(replica)
    # a rank called lost may have written more: only a later end replaces an earlier one
    if earlier is not None and earlier.committed >= end.committed:
        return False
    fields = {"committed": end.committed, "end": end.end.value}
    write_by_rename(_marker_of(replica), json.dumps(fields) + "\n")
    return True


def read_end(replica: Path) -> StreamEnd | None:
    """Read the end marker beside a replica; None without a readable one."""
    try:
        fields = read_json_map(_marker_of(replica))
        return StreamEnd(committed=int(fields["committed"]), end=EndReason(fields["end"]))
    except (SpoolError, KeyError, TypeError, ValueError):
        return None


def _marker_of(replica: Path) -> Path:
    return replica.with_suffix(".json")


# ---- how far bytes are valid ---------------------------------------------------------------------

_CHUNK = 4 << 20
_WINDOW = _CHUNK // CELL_BYTES
"""Cells searched at a time for the next record behind damage."""
Cells = npt.NDArray[np.uint8]
Heads = npt.NDArray[np.uint32]
"""Bytes 4..8 of cells, as numbers."""
Words = npt.NDArray[np.uint32]
_COVERED = CELL_BYTES - 4
_REVERSED_POLYNOMIAL = 0xEDB88320
_LEVELS = 12
CHECK_BLOCK = 1 << _LEVELS
"""Cells checked at a time: few enough to stay in the cache."""
_OF_ZEROS = zlib.crc32(bytes(_COVERED))
_SOUND_ZEROS = _OF_ZEROS.to_bytes(4, "little") + bytes(_COVERED)
"""A cell of zeros with its correct crc."""
_KIND = np.uint32(0xFF)
_FLAGS = np.uint32(0xFF00)
_FIRST_BIT = np.uint32(FIRST << 8)
_LEFT_SHIFT = 16


def committed_heads(cells: Cells) -> Heads:
    """Return the heads (kind, flags, left) of the valid records at the begin of cells [N, 64]."""
    check = BlockCheck()
    heads = np.empty(len(cells), np.uint32)
    end, before = 0, np.uint32(0)
    while end < len(cells):
        block = cells[end : end + CHECK_BLOCK]
        words = block.view("<u8")[:, 0].copy().view("<u4").reshape(-1, 2)
        block_heads = heads[end : end + len(block)]
        block_heads[:] = words[:, 1]
        shaped = _shaped(block_heads, before)
        if shaped:
            check.add(block[:shaped], words[:shaped, 0])
            before = block_heads[shaped - 1]
        end += shaped
        if shaped < len(block):
            break
    damaged = check.first_damaged()
    if damaged is not None:
        start = damaged * CHECK_BLOCK
        block = cells[start : min(start + CHECK_BLOCK, end)]
        stored = np.ascontiguousarray(block[:, :4]).view("<u4").reshape(-1)
        end = start + int(np.flatnonzero(stored != cell_crcs(block))[0])
    if end and heads[end - 1] >> _LEFT_SHIFT:
        lowest = max(0, end - MAX_RECORD_CELLS)
        # cut at the last first cell: a record whose rest is not there yet is not committed
        end = lowest + int(np.flatnonzero(heads[lowest:end] & _FIRST_BIT)[-1])
    return heads[:end]


def valid_runs(cells: Cells) -> Iterator[tuple[int, int]]:
    """Yield the first cell of each run of whole valid records, and the one behind its last; `cells`
    are [N, 64], from any cell of a stream on.

    Behind damage the next record is found by its first cell: its crc is right and its flag is
    set.
    """
    at = 0
    while at < len(cells):
        window = cells[at : at + _WINDOW + MAX_RECORD_CELLS]
        count = len(committed_heads(window))
        if count:
            yield at, at + count
            at += count
            continue
        searched = window[:_WINDOW]
        is_first = cell_heads(np.ascontiguousarray(searched)) & _FLAGS == _FIRST_BIT
        candidates = np.flatnonzero(is_first)
        stored = np.ascontiguousarray(searched[candidates, :4]).view("<u4").reshape(-1)
        candidates = candidates[stored == cell_crcs(searched[candidates])]
        behind = candidates[candidates > 0]
        # cell 0 failed as part of a record: the search goes on behind it
        at += int(behind[0]) if len(behind) else len(searched)


def cell_heads(cells: Cells) -> Heads:
    """Return bytes 4..8 of each cell as a number: kind, flags, left."""
    heads: Heads = cells.view("<u4")[:, 1].copy()
    return heads


def _shaped(heads: Heads, before: np.uint32) -> int:
    """Cells before the first that does not follow from the one before it, `before` the block's."""
    previous = np.empty_like(heads)
    previous[0], previous[1:] = before, heads[:-1]
    begins = (heads & _FLAGS == _FIRST_BIT) & (heads & _KIND != 0)
    # the same kind, no flag, and one cell fewer to follow than the cell before
    follows = heads == (previous & ~_FLAGS) - np.uint32(1 << _LEFT_SHIFT)
    wrong = np.flatnonzero(~np.where(previous >> _LEFT_SHIFT, follows, begins))
    return int(wrong[0]) if len(wrong) else len(heads)


def as_cells(buffer: bytes | memoryview | Cells) -> Cells:
    """Return the whole cells of a buffer, [N, 64], without copying."""
    flat = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return flat.reshape(-1)[: flat.size - flat.size % CELL_BYTES].reshape(-1, CELL_BYTES)


def valid_prefix(source: Path | bytes | Cells) -> int:
    """Bytes of whole valid records a replica, or a buffer from a record boundary on, begins with.

    What is settled of a replica counts as valid: nobody reads those bytes. Raises SpoolError where
    the file cannot be read.
    """
    if not isinstance(source, Path):
        return len(committed_heads(as_cells(source))) * CELL_BYTES
    with os_errors_as(SpoolError, f"{source}: cannot be read"), source.open("rb") as file:
        lock_for_reading(file.fileno())
        offset = settled_to(source)
        while True:  # in pieces: a replica may be larger than memory
            # the longest record behind the chunk: one that crosses its end is seen whole
            chunk = os.pread(file.fileno(), _CHUNK + MAX_RECORD_CELLS * CELL_BYTES, offset)
            valid_bytes = valid_prefix(chunk)
            offset += valid_bytes
            if valid_bytes == 0 or len(chunk) < _CHUNK:
                return offset


def cell_crcs(cells: npt.NDArray[np.uint8]) -> Words:
    """Return the CRC-32 of bytes 4..64 of each cell: [N, 64] bytes to [N]."""
    covered = np.ascontiguousarray(cells[:, 4:]).tobytes()
    starts = range(0, len(covered), _COVERED)
    return np.array([zlib.crc32(covered[at : at + _COVERED]) for at in starts], np.uint32)


@functools.cache
def _sound_zeros() -> list[int]:
    """The crc of 0, 1, 2 ... CHECK_BLOCK all-zero sound cells behind each other."""
    cells = itertools.repeat(_SOUND_ZEROS, CHECK_BLOCK)
    return list(itertools.accumulate(cells, lambda crc, cell: zlib.crc32(cell, crc), initial=0))


@functools.cache
def _powers() -> Words:
    """Z, Z^2, Z^4 ... as tables of what each byte of a crc becomes: [levels, 4, 256]."""
    words = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(_REVERSED_POLYNOMIAL), byte >> 1)
    powers = np.empty((_LEVELS, 4, 256), np.uint32)
    for _ in range(CELL_BYTES):
        words = (words >> 8) ^ byte[words & 0xFF]
    powers[0] = words
    for level in range(1, _LEVELS):
        powers[level] = _times(powers[level - 1], powers[level - 1])
    return powers


def _times(power: Words, words: Words) -> Words:
    octets = np.ascontiguousarray(words)[..., None].view(np.uint8)
    product: Words = power[0].take(octets[..., 0])
    for table, place in zip(power[1:], (1, 2, 3)):
        product ^= table.take(octets[..., place])
    return product


class BlockCheck:
    """Takes blocks of cells while they are in the cache, and says which blocks are sound."""

    def __init__(self) -> None:
        self._checksums: list[int] = []
        self._stored: list[Words] = []

    def add(self, block: npt.NDArray[np.uint8], stored: Words) -> None:
        """Take the next block, at most CHECK_BLOCK cells, and the crcs stored in them."""
        # a shorter block is taken for one that begins with all-zero cells: they contribute nothing
        crc = _sound_zeros()[CHECK_BLOCK - len(block)]
        self._checksums.append(zlib.crc32(np.ascontiguousarray(block).data, crc))
        self._stored.append(stored)

    def first_damaged(self) -> int | None:
        """Return the number of the first block with a wrong crc in it, None if all are right."""
        longest = max(map(len, self._stored), default=0)
        levels = max(longest - 1, 0).bit_length()
        sums = np.zeros((len(self._stored), 1 << levels), np.uint32)
        for row, stored in zip(sums, self._stored):
            np.bitwise_xor(stored, np.uint32(_OF_ZEROS), out=row[len(row) - len(stored) :])
        for power in _powers()[:levels]:
            sums = _times(power, sums[:, 0::2]) ^ sums[:, 1::2]
        expected = _times(_powers()[0], sums) ^ sums ^ np.uint32(_sound_zeros()[CHECK_BLOCK])
        wrong = np.flatnonzero(expected.reshape(-1) != np.array(self._checksums, np.uint32))
        return int(wrong[0]) if len(wrong) else None
