"""Whether a job that has no tree yet may still get one, and where this host keeps its records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankscope.errors import SpoolError
from rankscope.run.filenames import COLLECTOR_LOCK_NAME, HOST_STATE_PREFIX, REPLICA_FOLDER
from rankscope.run.folders import find_runs, is_held, relay_name, spool_base, stream_folder, streams
from rankscope.run.jobstatus import JobStatus, read_status
from rankscope.run.locks import is_abandoned, is_alive
from rankscope.spool.recordformat import origin_text
from rankscope.spool.replicas import read_end, replica_path, replicated
from rankscope.spool.streamreader import StreamReader
from rankscope.tree.assembly.sources import run_in

_SILENT_S = 30.0
"""Relays of other hosts leave a word in a shared folder every second."""


def is_at_work(folder: Path, run: Mapping[str, Any]) -> bool:
    """True while a collector, or a rank, relay or launcher of this host, is at work on the run, or
    another host's relay was just now."""
    if is_held(folder / COLLECTOR_LOCK_NAME):
        return True
    of_host = find_runs(spool_bases(run), str(run["id"]))
    if any(not is_abandoned(run_folder) for run_folder in of_host):
        return True
    own_states = {f"{HOST_STATE_PREFIX}{relay_name(run_folder)}.json" for run_folder in of_host}
    states = (folder / REPLICA_FOLDER).glob(f"{HOST_STATE_PREFIX}*.json")
    written = [path.stat().st_mtime for path in states if path.name not in own_states]
    return time.time() - max(written, default=0.0) < _SILENT_S


def is_about_to_end(folder: Path, run: Mapping[str, Any]) -> bool:
    """True while a collector is at work on a run whose ranks have all ended: what this host's ranks
    wrote last, or the word that they ended, is still on its way to it.

    Never true while a rank of this host lives, or one of another host has not been said to have
    ended: that job may train on.
    """
    if not is_held(folder / COLLECTOR_LOCK_NAME):
        return False
    are_open = {
        stream for stream in replicated(folder) if read_end(replica_path(folder, stream)) is None
    }
    # a stream of another host without an end marker may still grow there: nobody here knows
    of_host = set()
    for run_folder in find_runs(spool_bases(run), str(run["id"])):
        local = streams(run_folder)
        if any(is_alive(stream_folder(run_folder, stream)) for stream in local):
            return False
        of_host.update(local)
    return are_open <= of_host


def status_in(folder: Path) -> JobStatus:
    """Return the status of a running job; before the first is written at least which run it is."""
    status = read_status(folder)
    return status if status.written_ns else replace(status, run=run_in(folder) or status.run)


def received_bytes(folder: Path) -> int:
    """Return how many bytes of records are in a trace folder."""
    return sum(replicated(folder).values())


def spool_bases(run: Mapping[str, Any]) -> list[Path]:
    """Return the folders in which a host keeps the spools of a run."""
    chosen = run["settings"].get("spool")
    return sorted({spool_base(None), spool_base(Path(chosen) if chosen else None)})


def begin_in(run_folders: Iterable[Path], ranks: Iterable[Mapping[str, Any]]) -> bool:
    """True where spools of this host hold as much as a trace of each rank that it has records of,
    from the first byte on: a new trace of these spools lacks nothing of it. `ranks`: as
    `completeness` of the trace has them."""
    committed: dict[tuple[int, str], int] = {}
    for run_folder in run_folders:
        for stream in streams(run_folder):
            with (
                contextlib.suppress(SpoolError),
                StreamReader(stream_folder(run_folder, stream)) as reader,
            ):
                if not reader.lowest():
                    committed[stream.rank, origin_text(reader.origin())] = reader.committed()
    in_trace = ((r["rank"], r["origin"], r["received"]) for r in ranks if r["received"])
    return all(committed.get((rank, origin), 0) >= count for rank, origin, count in in_trace)
