"""Byte-identical copies of streams in the trace folder, and the markers that say how they ended.

The length of a replica is the collector's whole state: it is opened by cutting it to its valid
prefix (a kill may have torn the last write) and grows only at exactly its own end. Paths are built
from integers only and never followed through links.
"""

from __future__ import annotations

import json
import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import FolderError, SpoolError
from rankscope.record.run import EndReason, StreamId
from rankscope.spool.folder import read_json_map, stream_named, write_by_rename
from rankscope.spool.reader import valid_prefix
from rankscope.spool.records import ending, open_replica

__all__ = [
    "REPLICAS_NAME",
    "TREE_NAME",
    "Replicas",
    "StreamEnd",
    "dropped_in",
    "read_end",
    "replica_path",
    "replicated",
    "write_end",
]

REPLICAS_NAME = "spool"
TREE_NAME = "trace.json"
DEFAULT_QUOTA_BYTES = 64 << 30
_OPEN_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """How a stream ended, as its marker says."""

    committed: int
    end: EndReason
    dropped: int


def replica_path(out: Path, stream: StreamId) -> Path:
    """`<out>/spool/rank00003.0.cells`."""
    return out / REPLICAS_NAME / f"{stream.name}.cells"


def _end_path(out: Path, stream: StreamId) -> Path:
    return out / REPLICAS_NAME / f"{stream.name}.json"


def replicated(out: Path) -> dict[StreamId, int]:
    """Streams that have a replica, and its length in bytes."""
    found = {}
    try:
        with os.scandir(out / REPLICAS_NAME) as entries:
            for entry in entries:
                stream = stream_named(entry.name.removesuffix(".cells"))
                if stream is not None and entry.name.endswith(".cells"):
                    found[stream] = entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        pass
    return found


def write_end(out: Path, stream: StreamId, end: StreamEnd) -> None:
    """Write the end marker of a stream.

    Raises:
        SpoolError: it cannot be written.
    """
    fields = {"committed": end.committed, "end": end.end.value, "dropped": end.dropped}
    write_by_rename(_end_path(out, stream), json.dumps(fields) + "\n")


def read_end(out: Path, stream: StreamId) -> StreamEnd | None:
    """Read the end marker of a stream; None where there is none, or none that can be read."""
    try:
        fields = read_json_map(_end_path(out, stream))
        return StreamEnd(
            committed=int(fields["committed"]),
            end=EndReason(fields["end"]),
            dropped=int(fields["dropped"]),
        )
    except (SpoolError, KeyError, TypeError, ValueError):
        return None


def dropped_in(out: Path, stream: StreamId) -> int:
    """Records the replica itself says were dropped; 0 where it cannot be read."""
    try:
        return ending(open_replica(replica_path(out, stream))).dropped_records
    except SpoolError:
        return 0


class Replicas:
    """The replicas of one trace folder, open for appending: a bounded number of files at a time."""

    def __init__(self, out: Path, *, quota_bytes: int = DEFAULT_QUOTA_BYTES) -> None:
        """Make `<out>/spool` (0700).

        Raises:
            FolderError: it cannot be made.
        """
        self._out = out
        self._quota_bytes = quota_bytes
        self._lengths: dict[StreamId, int] = {}
        self._open: OrderedDict[StreamId, int] = OrderedDict()
        self.reports: list[str] = []
        """One line for each replica that was cut to its valid prefix, or that the disk refused."""
        try:
            out.mkdir(mode=0o700, parents=True, exist_ok=True)
            (out / REPLICAS_NAME).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise FolderError(f"{out}: cannot be made: {error.strerror}; see --rs-out") from error

    def length(self, stream: StreamId) -> int:
        """Bytes held of a stream; opens its replica the first time.

        Raises:
            FolderError: the replica cannot be opened.
        """
        if stream not in self._lengths:
            self._descriptor(stream)
        return self._lengths[stream]

    def append(self, stream: StreamId, offset: int, body: bytes) -> int:
        """Write `body` if `offset` is the replica's end; return the length afterwards either way.

        Raises:
            FolderError: the quota is used up; a disk that refuses is reported and tried again.
        """
        length = self.length(stream)
        if offset != length:
            return length
        if length + len(body) > self._quota_bytes:
            raise FolderError(
                f"{stream.name}: would exceed {self._quota_bytes} bytes, the quota of one stream"
            )
        descriptor = self._descriptor(stream)
        rest = memoryview(body)
        try:
            while rest:
                rest = rest[os.pwrite(descriptor, rest, length + len(body) - len(rest)) :]
        except OSError as error:
            os.ftruncate(descriptor, length)
            path = replica_path(self._out, stream)
            self.reports.append(f"{path}: cannot be written: {error.strerror}")
            return length
        self._lengths[stream] = length + len(body)
        return self._lengths[stream]

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, stream: StreamId) -> int:
        descriptor = self._open.get(stream)
        if descriptor is not None:
            self._open.move_to_end(stream)
            return descriptor
        path = replica_path(self._out, stream)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise FolderError(f"{path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise FolderError(f"{path}: is no ordinary file; remove it")
        if stream not in self._lengths:
            whole = valid_prefix(path)
            if whole != status.st_size:
                os.ftruncate(descriptor, whole)
                self.reports.append(f"{path}: cut from {status.st_size} to {whole} valid bytes")
            self._lengths[stream] = whole
        self._open[stream] = descriptor
        while len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor
