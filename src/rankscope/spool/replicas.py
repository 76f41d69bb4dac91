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
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.errors import SpoolError, os_errors_as
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.filenames import CELLS_SUFFIX, REPLICA_FOLDER, SETTLED_SUFFIX
from rankscope.run.files import punch_hole, read_json_map, replacing, write_by_rename
from rankscope.run.folders import stream_named
from rankscope.spool.recordformat import CELL_BYTES, first_record, record_bytes

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
