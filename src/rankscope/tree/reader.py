"""Opening a trace: the finished files, or the ranks' records while a job still runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union

from rankscope.errors import FolderError, TraceError
from rankscope.run.filenames import CELLS_SUFFIX, REPLICA_FOLDER, TRACE_FORMAT, TRACE_NAME, Progress
from rankscope.run.jobend import job_end
from rankscope.tree.damage import UNREADABLE
from rankscope.tree.digests import Columns
from rankscope.tree.finishedtrace import TraceFiles, columns_in, file_faults, wait_for_collector
from rankscope.tree.growingtree import GrowingTree, step_name
from rankscope.tree.stepfiles import nodes_path, read_nodes
from rankscope.tree.views import Trace

if TYPE_CHECKING:
    from rankscope.chunks.tensorfiles import TensorRecords
    from rankscope.record.streams import StreamId
    from rankscope.tree.document import Document

__all__ = ["Openable", "RecordSource", "TraceLike", "newest_trace", "open_trace", "opened_trace"]

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


class RecordSource:
    """A trace assembled in memory."""

    def __init__(self, document: Document, folder: Path, *, is_compact: bool = False) -> None:
        """`is_compact`: numbers stand in the columns alone, as in a large trace."""
        self._document, self._folder, self._is_compact = document, folder, is_compact
        self.head: Mapping[str, Any] = {"run": document.run, "completeness": document.completeness}
        self.groups = [(document.is_setup(i), head) for i, head in enumerate(document.heads())]

    def file(self, group: int) -> Path:
        """Where the records are."""
        return self._folder

    def nodes(self, group: int) -> list[dict[str, Any]]:
        """Return the nodes of a group."""
        return self._document.nodes(group, is_compact=self._is_compact)

    def columns(self) -> Columns:
        """Return the value columns."""
        from rankscope.tree.columns import columns_of  # numpy: a finished tree is shown without

        return {name: make() for name, make in columns_of(self._document).items()}

    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Return what the records say of chunks that are still written."""
        return self._document.tensors

    def faults(self) -> Iterator[str]:
        """Yield nothing: what is wrong with the records stands beside their rank."""
        yield from ()


class GrownSource:
    """A trace whose job still runs: steps that are written, and the rest in memory."""

    def __init__(self, tree: GrowingTree, rest: RecordSource) -> None:
        """Join them; rows of the rest are counted behind those that are written."""
        self._folder, self._rest = tree.out, rest
        self.head = rest.head
        parts = [*tree.parts()]
        self._files = [dict(part.values) for part in parts]
        written = [(head, -1) for part in parts for head in part.steps]
        left = [(head, i) for i, (is_setup, head) in enumerate(rest.groups) if not is_setup]
        setup = [(head, i) for i, (is_setup, head) in enumerate(rest.groups) if is_setup]
        steps = sorted([*written, *left], key=lambda each: step_name(each[0]))
        self.groups = [*((True, head) for head, _ in setup), *((False, head) for head, _ in steps)]
        self._places = [place for _, place in (*setup, *steps)]
        """Number of each group in the rest, -1 where it is written."""

    def file(self, group: int) -> Path:
        """Where the nodes of a group are."""
        if self._places[group] >= 0:
            return self._rest.file(group)
        return nodes_path(self._folder, self.groups[group][1])

    def nodes(self, group: int) -> list[dict[str, Any]]:
        """Return the nodes of a group."""
        place = self._places[group]
        return read_nodes(self.file(group)) if place < 0 else self._rest.nodes(place)

    def columns(self) -> Columns:
        """Return the value columns."""
        return columns_in(
            self._folder, self._files, self.head["run"]["world_size"], self._rest.columns()
        )

    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Return what the records say of chunks that are still written."""
        return self._rest.tensors()

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with each file of the steps that are written."""
        heads = [head for place, (_, head) in zip(self._places, self.groups) if place < 0]
        yield from file_faults(self._folder, heads, self._files, self.head["run"]["world_size"])


def newest_trace(base: Path | None = None) -> Path:
    """Return the trace that is meant in `base` (default: here) where none is named: the trace whose
    folder that is, else the newest rankscope-* folder in it, else the trace it lies in.

    Raises:
        FolderError: there is none.
    """
    place = base or Path.cwd()
    if _is_trace(place):
        return place
    folders = [
        f
        for f in place.glob("rankscope-*")
        if (f / TRACE_NAME).is_file() or (f / REPLICA_FOLDER).is_dir()
    ]
    if folders:
        return max(folders, key=lambda folder: folder.stat().st_mtime)
    for folder in place.parents:
        if _is_trace(folder):
            return folder
    raise FolderError(
        f"{place}: holds no rankscope-* trace folder, and is in no trace; name the trace to read"
    )


def _is_trace(folder: Path) -> bool:
    """True for a folder of any name with a tree or records of ours; others have a trace.json, or a
    folder `spool` (/var), too."""
    try:
        with (folder / TRACE_NAME).open("rb") as file:
            if _OURS in file.read(_HEAD_BYTES):
                return True
    except OSError:
        pass
    return next((folder / REPLICA_FOLDER).glob(f"rank*{CELLS_SUFFIX}"), None) is not None


def open_trace(
    given: TraceLike | None = None,
    *,
    wait_s: float = 60.0,
    progress: Progress | None = None,
    takes_golden: bool = False,
) -> Trace:
    """Open a trace as `rankscope.open_trace` does, but for its tensors; the one place that says
    what a trace is.

    Args:
        given: the trace; default the one this is inside of, or the newest rankscope-* folder here.
        wait_s, progress: as there.
        takes_golden: a golden file is a trace too.

    Raises:
        FolderError, TraceError, TraceVersionError: as there.
    """
    if isinstance(given, Trace):
        return given
    if given is not None and not isinstance(given, (str, os.PathLike)):
        handed = given.open() if hasattr(given, "open") else None
        if not isinstance(handed, Trace):
            raise _no_trace(given)
        return handed
    folder = newest_trace() if given is None else Path(given)
    if folder.name == TRACE_NAME and not folder.is_dir():
        folder = folder.parent
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
    from rankscope.tree.unfinished import is_about_to_end

    run, left_s = trace.run, deadline - time.monotonic()
    if left_s <= 0 or not is_about_to_end(folder, run):
        return trace
    wait_for_collector(folder, left_s, progress, lambda: is_about_to_end(folder, run))
    return _finished(folder) or _unfinished(folder, progress)


def _finished(folder: Path) -> Trace | None:
    """Return the trace of a folder in which the tree is written, None where it is not."""
    if not (folder / TRACE_NAME).exists():
        return None
    return _understood(folder, lambda: Trace(TraceFiles(folder), folder))


def _unfinished(folder: Path, progress: Progress | None) -> Trace:
    """Return the trace that the records make which have come so far.

    Raises:
        FolderError: the folder is empty.
        TraceError: there are none.
    """
    from rankscope.assembly.sources import find_streams
    from rankscope.tree.build import (  # slow to import; a finished tree needs neither
        assemble,
        rest_of,
    )
    from rankscope.tree.unfinished import is_at_work

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
    tree = GrowingTree(folder)  # behind the records: what they lack by now stands there
    document = assemble(
        sources,
        settle=lambda streams: rest_of(streams, tree),
        progress=progress,
        began_ns=tree.began_ns,
        end=job_end([folder]),
    )
    finished = _finished(folder)
    if finished is not None:  # whose index is gone
        return finished
    document.first_row, document.first_sample = tree.rows["values"], tree.rows["samples"]
    rest = RecordSource(document, folder)
    at_work = is_at_work(folder, rest.head["run"])
    source = GrownSource(tree, rest) if tree.written else rest
    return Trace(source, folder, is_live=at_work, is_written=False, read_s=read_s)


def _understood(folder: Path, read: Any) -> Trace:
    try:
        trace: Trace = read()
    except UNREADABLE as error:
        raise TraceError(
            f"{folder / TRACE_NAME}: {type(error).__name__} {error}: the trace is damaged"
        ) from error
    return trace


@contextmanager
def opened_trace(given: TraceLike, *, takes_golden: bool = False) -> Iterator[Trace]:
    """Hand out the trace that is meant; one that is opened for it is closed at the end.

    Args, Raises: as of `open_trace`, but that nothing stands for the newest.
    """
    if given is None:
        raise _no_trace(given)
    trace = open_trace(given, takes_golden=takes_golden)
    try:
        yield trace
    finally:
        if trace is not given:
            trace.close()


def _no_trace(given: object) -> FolderError:
    return FolderError(
        f"{type(given).__name__} is no trace",
        "give an open trace, its folder, or what `with rankscope.trace(...) as` gave",
    )
