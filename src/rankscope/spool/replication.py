"""Replicas in a trace folder: byte-identical copies of streams, and beside each its end marker.

    <trace>/spool/rank00003.0.cells    the replica
    <trace>/spool/rank00003.0.json     its end marker, written once the stream has ended

Of a job whose steps are written while it runs the first bytes of a replica may be gone
(`spool.settledprefix`).
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.record.streams import EndReason, StreamId
from rankscope.run.filenames import CELLS_SUFFIX, REPLICA_FOLDER
from rankscope.run.folders import stream_named
from rankscope.run.replacing import read_json_map, write_by_rename


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """How a stream ended, and how many bytes its rank committed, as its marker says."""

    committed: int
    end: EndReason


def replica_path(out: Path, stream: StreamId) -> Path:
    """Where the replica of a stream lies in a trace folder."""
    return out / REPLICA_FOLDER / f"{stream.name}{CELLS_SUFFIX}"


def replicated(out: Path) -> dict[StreamId, int]:
    """Streams that have a replica, and its length in bytes."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(out / REPLICA_FOLDER) as entries:
        for entry in entries:
            stream = stream_named(entry.name.removesuffix(CELLS_SUFFIX))
            if stream is not None and entry.name.endswith(CELLS_SUFFIX):
                found[stream] = entry.stat(follow_symlinks=False).st_size
    return found


def write_end(replica: Path, end: StreamEnd) -> bool:
    """Write the end marker beside a replica; False where one is there that tells of as many bytes.
    Raises SpoolError where the marker cannot be written."""
    known = read_end(replica)
    if known is not None and known.committed >= end.committed:
        return False
    fields = {"committed": end.committed, "end": end.end.value}
    write_by_rename(_marker_of(replica), json.dumps(fields) + "\n")
    return True


def read_end(replica: Path) -> StreamEnd | None:
    """Read the end marker beside a replica; None where there is none, or none that can be read."""
    try:
        fields = read_json_map(_marker_of(replica))
        return StreamEnd(committed=int(fields["committed"]), end=EndReason(fields["end"]))
    except (SpoolError, KeyError, TypeError, ValueError):
        return None


def _marker_of(replica: Path) -> Path:
    return replica.with_suffix(".json")
