"""Where the bytes of streams lie: replicas in a trace folder, segments in a spool folder, or both.

    <trace>/spool/rank00003.0.cells     replica, with its end marker rank00003.0.json beside it
    <folder>/rank00003.0/000001.cells   segment 1 of that stream: bytes from 1 * its size on

The relay frees segments once they are acknowledged, so a spool often holds only the end of a stream
and a replica its beginning; together they are the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rankscope.errors import FolderError, SpoolError
from rankscope.record.run import EndReason, StreamId
from rankscope.spool.folder import read_json_map, stream_named
from rankscope.spool.lock import is_alive
from rankscope.spool.reader import StreamReader, valid_prefix
from rankscope.spool.segment import segment_indexes
from rankscope.tree.names import REPLICA_FOLDER
from rankscope.tree.streams import Array, StreamBytes

__all__ = ["REPLICA_FOLDER", "EndMarker", "find_streams", "read_end_marker", "replica_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMarker:
    """What stands beside a replica whose stream has ended."""

    committed: int | None
    """Bytes the rank committed."""
    end: EndReason


@dataclass(slots=True)
class _Found:
    replicas: list[Path] = field(default_factory=list)
    segments: list[Path] = field(default_factory=list)


def replica_path(out: Path, stream: StreamId) -> Path:
    """Where the replica of a stream lies in a trace folder."""
    return out / REPLICA_FOLDER / f"{stream.name}.cells"


def read_end_marker(replica: Path) -> EndMarker | None:
    """Return the end marker beside a replica, None where there is none (or none that can be
    read)."""
    try:
        fields = read_json_map(replica.with_suffix(".json"))
        committed = fields.get("committed")
        return EndMarker(
            committed=None if committed is None else int(committed),
            end=EndReason(str(fields.get("end", "lost"))),
        )
    except (SpoolError, ValueError, TypeError):
        return None


def find_streams(folders: Sequence[Path]) -> list[StreamBytes]:
    """Return the bytes of every stream found in the folders, lowest rank first.

    Args:
        folders: trace folders, spool folders of a host's run, or folders of replicas.

    Raises:
        FolderError: one of them does not exist.
        SpoolError: a file cannot be read.
    """
    found: dict[StreamId, _Found] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FolderError(f"{folder}: no such folder")
        for place in (folder, folder / REPLICA_FOLDER):
            for entry in sorted(place.iterdir()) if place.is_dir() else ():
                _note(entry, found)
    return [_join(stream, found[stream]) for stream in sorted(found)]


def _note(entry: Path, found: dict[StreamId, _Found]) -> None:
    is_replica = entry.suffix == ".cells" and entry.is_file()
    stream = stream_named(entry.name.removesuffix(".cells") if is_replica else entry.name)
    if stream is None:
        return
    if is_replica:
        found.setdefault(stream, _Found()).replicas.append(entry)
    elif entry.is_dir() and segment_indexes(entry):
        found.setdefault(stream, _Found()).segments.append(entry)


def _join(stream: StreamId, found: _Found) -> StreamBytes:
    """Put together what several places hold of one stream: the longest replica, then segments
    behind it."""
    best: Path | None = None
    length = 0
    for path in found.replicas:
        valid = valid_prefix(path)
        if best is None or valid > length:
            best, length = path, valid
    data: Array = (
        np.memmap(best, np.uint8, "r")[:length]
        if best is not None and length
        else np.empty(0, np.uint8)
    )
    notes: list[str] = []
    pieces = [data]
    committed: int | None = None
    alive = False
    for folder in found.segments:
        with StreamReader(folder) as reader:
            lowest = reader.lowest()
            if lowest > length:
                notes.append(
                    f"bytes {length}..{lowest} are missing: "
                    "add the trace folder or spool that has them"
                )
                continue
            for chunk in reader.chunks(length):
                pieces.append(np.frombuffer(chunk, np.uint8))
                length += len(chunk)
            committed = max(committed or 0, reader.committed(max(length, lowest)))
        alive = alive or is_alive(folder)
    marker = _latest(read_end_marker(path) for path in found.replicas)
    if marker is not None and marker.committed is not None:
        committed = max(committed or 0, marker.committed)
    end = marker.end if marker else None
    if end is None and found.segments:
        end = EndReason.RUNNING if alive else EndReason.LOST
    return StreamBytes(
        stream=stream,
        data=pieces[0] if len(pieces) == 1 else np.concatenate(pieces),
        is_verified=True,
        committed=committed,
        end=end,
        notes=tuple(notes),
    )


def _latest(markers: Iterable[EndMarker | None]) -> EndMarker | None:
    known = [marker for marker in markers if marker is not None]
    return max(known, key=lambda m: m.committed or 0, default=None)
