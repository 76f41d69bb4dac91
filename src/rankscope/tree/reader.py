"""Opening a trace: the finished files, or the ranks' records while a job still runs; whether a job
without a tree may still get one, and where this host keeps its records.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Union

from rankscope.errors import FolderError, SpoolError, TraceError
from rankscope.run.folders import (
    CELLS_SUFFIX,
    COLLECTOR_LOCK_NAME,
    COLLECTOR_LOG_NAME,
    HOST_STATE_PREFIX,
    REPLICA_FOLDER,
    TRACE_FORMAT,
    TRACE_NAME,
    Progress,
    find_runs,
    is_held,
    relay_name,
    spool_base,
    stream_folder,
    streams,
)
from rankscope.run.jobstatus import JobStatus, job_end, read_status
from rankscope.run.processes import is_abandoned, is_alive
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import origin_text
from rankscope.spool.replicas import read_end, replica_path, replicated
from rankscope.tree.assembly.sources import run_in
from rankscope.tree.growingtree import GrowingTree, trace_files
from rankscope.tree.tracejson import UNREADABLE, damage
from rankscope.tree.views import Trace

_HEAD_BYTES = 4096
_OURS = TRACE_FORMAT.partition("/")[0].encode()
"""Stands in the first bytes of every trace.json of ours."""
_FOLDER = "give the trace folder that rankscope run named"


class Openable(Protocol):
    """What `with rankscope.trace(...)` hands out."""

    def open(self) -> Trace:
        """Return the finished trace."""


TraceLike = Union[Trace, str, "os.PathLike[str]", Openable]
"""What every function takes that reads a trace: open, its folder (or the trace.json in it), or what
`with rankscope.trace(...) as` gave."""


def newest_trace(base: Path | None = None) -> Path:
    """Return the folder of the trace in `base` (default: here): `base` itself, else the newest
    trace in it, else the trace around it. FolderError: there is no trace."""
    place = base or Path.cwd()
    if _is_trace(place):
        return place
    if folders := [f for f in place.iterdir() if _is_begun(f) or _is_trace(f)]:
        return max(folders, key=lambda folder: folder.stat().st_mtime)
    for folder in place.parents:
        if _is_trace(folder):
            return folder
    raise FolderError(f"{place}: holds no trace folder, and is in no trace; name the trace to read")


def _is_begun(folder: Path) -> bool:
    """True for a folder with our name, though no rank may have written a record yet."""
    has_name = folder.name.startswith("rankscope-")
    return has_name and ((folder / TRACE_NAME).is_file() or (folder / REPLICA_FOLDER).is_dir())


def _is_trace(folder: Path) -> bool:
    """True for a folder with a tree or records of ours; others have such names too (/var/spool)."""
    try:
        with (folder / TRACE_NAME).open("rb") as file:
            if _OURS in file.read(_HEAD_BYTES):
                return True
    except OSError:
        pass
    return next((folder / REPLICA_FOLDER).glob(f"rank*{CELLS_SUFFIX}"), None) is not None


def trace_folder(named: Path | None) -> Path:
    """Return the folder that a trace is named by: `trace.json` stands for the folder it is in, None
    for the trace this is inside of, or the newest one here. FolderError: None, and nothing is
    here."""
    folder = newest_trace() if named is None else named
    return folder.parent if folder.name == TRACE_NAME and not folder.is_dir() else folder


def open_trace(
    source: TraceLike | None = None,
    *,
    wait_s: float = 60.0,
    progress: Progress | None = None,
    takes_golden: bool = False,
) -> Trace:
    """Open a trace as `rankscope.open_trace` does, with the same errors, but for its tensors; the
    one place that says what a trace is. With `takes_golden` a golden file is a trace too."""
    if isinstance(source, Trace):
        return source
    if source is not None and not isinstance(source, (str, os.PathLike)):
        handed = source.open() if hasattr(source, "open") else None
        if not isinstance(handed, Trace):
            raise _no_trace(source)
        return handed
    folder = trace_folder(None if source is None else Path(source))
    if folder.is_file():
        from rankscope.tree.goldenfile import GoldenFile, is_golden  # numpy: as above

        if takes_golden and is_golden(folder):
            return _understood(folder, GoldenFile(folder).trace)
        raise FolderError(f"{folder}: is a file", f"{_FOLDER}, or, to diff alone, a golden trace")
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such folder", _FOLDER)
    deadline = time.monotonic() + wait_s
    wait_for_collector(folder, wait_s, progress)
    trace = _finished(folder) or _unfinished(folder, progress)
    if trace.is_written or not trace.is_live:
        return trace
    from rankscope.tree.reader import is_about_to_end

    run, left_s = trace.run, deadline - time.monotonic()
    if left_s <= 0 or not is_about_to_end(folder, run):
        return trace
    wait_for_collector(folder, left_s, progress, lambda: is_about_to_end(folder, run))
    return _finished(folder) or _unfinished(folder, progress)


def _finished(folder: Path) -> Trace | None:
    """Return the trace of a folder in which the tree is written, None where it is not."""
    if not (folder / TRACE_NAME).exists():
        return None
    return _understood(folder, lambda: Trace(trace_files(folder), folder))


def _unfinished(folder: Path, progress: Progress | None) -> Trace:
    """Return the trace of the records so far. FolderError: an empty folder; TraceError: no
    records."""
    from rankscope.tree.assembly.sources import find_streams
    from rankscope.tree.build import (  # slow to import; a finished tree needs neither
        assemble,
        told_of_lost,
    )
    from rankscope.tree.reader import is_at_work

    read_s = time.time()
    sources = find_streams([folder])
    if not sources:
        finished = _finished(folder)  # between the two looks
        if finished is not None:
            return finished
        if not any(folder.iterdir()):
            raise FolderError(f"{folder}: is empty: nothing has been traced into it yet", _FOLDER)
        raise TraceError(
            f"{folder}: not a trace: it holds neither {TRACE_NAME} nor records in {REPLICA_FOLDER}/"
            "; ranks of a job record from its first forward on, and with --rs-steps last:N send "
            "nothing until something happens"
        )
    tree = GrowingTree(
        folder
    )  # read after the records: steps that were freed meanwhile stand in it
    document = assemble(
        sources,
        settle=lambda streams: told_of_lost(streams, tree),
        written=tree.written,
        progress=progress,
        began_ns=tree.began_ns,
        end=job_end([folder]),
    )
    if (finished := _finished(folder)) is not None:  # whose index is gone
        return finished
    at_work = is_at_work(folder, document.run)
    entries = [*tree.entries()]
    began_ns = document.began_ns if tree.began_ns is None else tree.began_ns
    return tree.trace(
        document.head,
        entries,
        began_ns,
        unwritten=document,
        is_live=at_work,
        is_written=False,
        read_s=read_s,
    )


def _understood(folder: Path, read: Any) -> Trace:
    try:
        trace: Trace = read()
    except UNREADABLE as error:
        raise damage(folder / TRACE_NAME, error) from error
    return trace


@contextmanager
def opened_trace(source: TraceLike, *, takes_golden: bool = False) -> Iterator[Trace]:
    """Hand out the trace that is meant; one that is opened for it is closed at the end. As
    `open_trace`, but that nothing stands for the newest."""
    if source is None:
        raise _no_trace(source)
    trace = open_trace(source, takes_golden=takes_golden)
    try:
        yield trace
    finally:
        if trace is not source:
            trace.close()


def _no_trace(source: object) -> FolderError:
    return FolderError(
        f"{type(source).__name__} is not a trace",
        "give an open trace, its folder, or what `with rankscope.trace(...) as` gave",
    )


def wait_for_collector(
    folder: Path,
    wait_s: float,
    progress: Progress | None,
    is_about_to_end: Callable[[], bool] = lambda: False,
) -> None:
    """Return once trace.json is there, or nobody is about to write it, after `wait_s` at most.

    Where a collector is at work and nothing has come yet, records may be on their way from a job
    that was over quickly: that is waited for as well, but not long. `is_about_to_end` says what
    this folder alone does not, that a tree will come.
    """
    started = time.monotonic()
    while not (folder / TRACE_NAME).exists():
        waited = time.monotonic() - started
        is_expected = _is_finishing(folder) or (waited < _FIRST_S and _is_without_records(folder))
        if waited >= wait_s or not (is_expected or is_about_to_end()):
            return
        if progress is not None:
            progress("waiting for the collector", waited / wait_s)
        time.sleep(min(_POLL_S, wait_s - waited))


def _is_without_records(folder: Path) -> bool:
    """True where no record has come, and a collector holds the folder or is about to."""
    if any(replica.stat().st_size for replica in _replicas(folder)):
        return False
    is_prepared = any((folder / name).exists() for name in _OF_A_COLLECTOR)
    is_fresh = is_prepared and time.time() - folder.stat().st_mtime < _FIRST_S
    return is_fresh or is_held(folder / COLLECTOR_LOCK_NAME)


def _replicas(folder: Path) -> list[Path]:
    return [*(folder / REPLICA_FOLDER).glob(f"*{CELLS_SUFFIX}")]


def _is_finishing(folder: Path) -> bool:
    """True where every stream has ended and a collector still holds the folder."""
    replicas = _replicas(folder)
    if not replicas or not all(replica.with_suffix(".json").exists() for replica in replicas):
        return False
    return is_held(folder / COLLECTOR_LOCK_NAME)


_POLL_S = 0.1


_OF_A_COLLECTOR = (COLLECTOR_LOG_NAME, COLLECTOR_LOCK_NAME, REPLICA_FOLDER)


_FIRST_S = 10.0
"""How long the first records may take to come."""


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
