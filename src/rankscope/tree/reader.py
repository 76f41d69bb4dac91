"""Opening a trace: the finished files, or the ranks' records while a job still runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rankscope.errors import FolderError, SelectionError, TraceError
from rankscope.globs import glob_matches
from rankscope.layout.placement import Mesh
from rankscope.record.call import Mode, Phase
from rankscope.record.ranklists import ranks_named
from rankscope.run.names import CELLS_SUFFIX, REPLICA_FOLDER, TRACE_FORMAT, TRACE_NAME, Progress
from rankscope.run.out import typed
from rankscope.run.stalls import Stall, standstills_in
from rankscope.tree.damage import UNREADABLE
from rankscope.tree.digests import Columns
from rankscope.tree.selection import default_phase, nothing_matched
from rankscope.tree.summary import extent, state
from rankscope.tree.tracefiles import TraceFiles, wait_for_collector
from rankscope.tree.views import GroupHead, Node, TensorReaders, Value, Whereabouts

if TYPE_CHECKING:
    from rankscope.chunks.tensorfiles import TensorFiles, TensorRecords
    from rankscope.record.streams import StreamId
    from rankscope.tree.document import Document

__all__ = ["RecordSource", "Step", "Trace", "newest_trace", "open_trace"]

_HEAD_BYTES = 4096
_OURS = TRACE_FORMAT.partition("/")[0].encode()
"""Stands in the first bytes of every trace.json of ours."""


class _TraceSource(Protocol):
    """Where a trace's data comes from."""

    head: Mapping[str, Any]
    """Everything but the nodes."""
    groups: list[tuple[bool, dict[str, Any]]]
    """is setup, head of each group of nodes."""

    def file(self, group: int) -> Path: ...

    def nodes(self, group: int) -> list[dict[str, Any]]: ...

    def columns(self) -> Columns: ...

    def tensors(self) -> Mapping[StreamId, TensorRecords]: ...


class RecordSource:
    """A trace assembled in memory."""

    def __init__(self, document: Document, folder: Path) -> None:
        self._document, self._folder = document, folder
        self.head: Mapping[str, Any] = {"run": document.run, "completeness": document.completeness}
        self.groups = [(document.is_setup(i), head) for i, head in enumerate(document.heads())]

    def file(self, group: int) -> Path:
        """Where the records are."""
        return self._folder

    def nodes(self, group: int) -> list[dict[str, Any]]:
        """Return the nodes of a group."""
        return self._document.nodes(group)

    def columns(self) -> Columns:
        """Return the value columns."""
        from rankscope.tree.columns import columns_of  # numpy: a finished tree is shown without

        return {name: make() for name, make in columns_of(self._document).items()}

    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Return what the records say of chunks that are still written."""
        return self._document.tensors


class Step:
    """One step of one mode, or the setup, with its nodes."""

    def __init__(self, source: _TraceSource, group: int, where: Whereabouts) -> None:
        self._source, self._group = source, group
        self._where = replace(where, file=source.file(group))
        is_setup, head = source.groups[group]
        self.is_setup = is_setup
        self.mode = Mode[str(head.get("mode", "train")).upper()]
        self.step = int(head.get("step", 0))
        self.incarnation = int(head.get("incarnation", 0))
        self.notes: tuple[str, ...] = tuple(
            f"{ranks_named(n['ranks'])}: {n['note']}" for n in head.get("notes", ())
        )

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The outermost calls of the step, in order."""
        return tuple(self.fresh())

    def fresh(self) -> Iterator[Node]:
        """Yield the outermost calls, read anew: nothing here keeps them."""
        head = GroupHead(mode=self.mode, step=self.step, incarnation=self.incarnation)
        return (Node(data, head, self._where) for data in self._source.nodes(self._group))

    def walk(self) -> Iterator[Node]:
        """Yield every node of the step, parents first."""
        for node in self.nodes:
            yield from node.walk()

    def passing(self) -> Iterator[Node]:
        """Yield what `walk` yields, and keep none of it: a pass over a large trace holds one step
        at a time."""
        for node in self.fresh():
            yield from node.walk()

    def __repr__(self) -> str:
        return "Step(setup)" if self.is_setup else f"Step({self.mode.word} {self.step})"


class Trace:
    """One trace: what ran where, how much of it arrived, and the tree."""

    def __init__(
        self, source: _TraceSource, path: Path, *, is_live: bool = False, is_written: bool = True
    ) -> None:
        self.path = path
        """The trace folder."""
        self.is_live = is_live
        """True where the tree is not written yet, and somebody is at work who may write it."""
        self.is_written = is_written
        """False where the tree was assembled from the records that were there."""
        self.run: Mapping[str, Any] = source.head["run"]
        """The run header, as in docs/trace-format.md."""
        self.completeness: Mapping[str, Any] = source.head["completeness"]
        """Per rank what was committed, received and dropped, as in docs/trace-format.md."""
        meshes = {m["name"]: _meshes(m) for m in self.run["meshes"]}
        self.tensors: TensorReaders | None = None
        """Set by `rankscope.open_trace`."""
        self._columns: Columns | None = None
        self._source = source
        where = Whereabouts(self.columns, meshes, path, self)
        every = [Step(source, group, where) for group in range(len(source.groups))]
        self.setup: tuple[Step, ...] = tuple(step for step in every if step.is_setup)
        """Setup of every incarnation that recorded one."""
        self.steps: tuple[Step, ...] = tuple(step for step in every if not step.is_setup)
        """Steps of all modes and incarnations, in order."""

    @property
    def is_complete(self) -> bool:
        """True where every record of every rank is here and every rank ended in order."""
        return bool(self.completeness["complete"]) and self.is_written

    def columns(self) -> Columns:
        """Return the per-rank numbers as columns (docs/trace-format.md), mapped where they lie in a
        file."""
        if self._columns is None:
            self._columns = self._source.columns()
        return self._columns

    @cached_property
    def tensor_files(self) -> TensorFiles:
        """The full tensors that were kept: found by rank, incarnation and the reference in
        `columns()`, mapped where they lie; of a job that still runs those that are whole."""
        from rankscope.chunks.tensorfiles import TensorFiles  # numpy: as above

        return TensorFiles(self.path, self._source.tensors())

    @cached_property
    def standstills(self) -> list[Stall]:
        """Times in which no rank of a host moved, as relays noticed them."""
        return standstills_in(self.path)

    @property
    def default_mode(self) -> Mode:
        """Train, or eval where there is no train step."""
        return (
            Mode.TRAIN
            if any(s.mode is Mode.TRAIN for s in self.steps) or not self.steps
            else Mode.EVAL
        )

    def walk(self) -> Iterator[Node]:
        """Yield every node: setup, then the steps."""
        for step in (*self.setup, *self.steps):
            yield from step.walk()

    def find(
        self,
        path: str = "*",
        *,
        phase: Phase | str | None = None,
        step: int | None = None,
        mode: Mode | str | None = None,
        micro_batch: int | None = None,
    ) -> list[Node]:
        """Return the nodes whose path matches a glob, and whatever else is asked for.

        Args:
            path: fnmatch glob on the whole canonical path; "" is the root.
            phase: one phase, or all.
            step: one step, or all.
            mode: train, eval, or both.
            micro_batch: one micro-batch, or all.

        Raises:
            SelectionError: no node of the trace has such a path; lists near ones.
        """
        wanted_phase = _named(Phase, "phase", phase)
        wanted_mode = _named(Mode, "mode", mode)
        found, seen = [], set[str]()
        for group in (*self.setup, *self.steps):
            for node in group.walk():
                seen.add(node.path)
                if (
                    glob_matches(path, node.path)
                    and (wanted_phase is None or node.phase is wanted_phase)
                    and (step is None or group.step == step)
                    and (wanted_mode is None or group.mode is wanted_mode)
                    and (micro_batch is None or node.micro_batch == micro_batch)
                ):
                    found.append(node)
        if not found and not any(glob_matches(path, name) for name in seen):
            raise nothing_matched("path", path, seen)
        return found

    def value(
        self,
        path: str,
        slot: str,
        *,
        step: int = 0,
        micro_batch: int | None = 0,
        phase: Phase | str | None = None,
        mode: Mode | str | None = None,
        ordinal: int = 0,
    ) -> Value:
        """Return one value over all ranks, of the last incarnation that has it.

        Args:
            path: canonical path, "" for the root.
            slot: its name, such as `output` or `param:weight`.
            step: number of the step.
            micro_batch: ignored in phases that have none.
            phase: part of the step; by default the slot decides: backward for `grad_input` and
                `grad_output`, grads for `grad:`, params for `param:` and `buffer:`, else forward.
            mode: default train, or eval where there is no train step.
            ordinal: which call of the path.

        Raises:
            SelectionError: there is no such value; says what there is.
        """
        wanted: Phase = default_phase(slot) if phase is None else _named(Phase, "phase", phase)
        chosen: Mode = self.default_mode if mode is None else _named(Mode, "mode", mode)
        groups = self.setup if wanted is Phase.SETUP else self.steps
        nodes = [
            node
            for group in reversed(groups)
            if group.is_setup or (group.step == step and group.mode is chosen)
            for node in group.walk()
            if node.phase is wanted
            and node.path == path
            and node.ordinal == ordinal
            and node.micro_batch in (None, micro_batch)
        ]
        if not nodes:
            if all(node.path != path for node in self.walk()):
                raise nothing_matched("path", path, (node.path for node in self.walk()))
            self._refuse_another_phase(path, slot, wanted)
            raise SelectionError(
                f"{path or '(root)'} has no {wanted.word} call in {chosen.word} step {step}, "
                f"micro-batch {micro_batch}, ordinal {ordinal}; list its calls with: "
                f"{typed('show', self.path)} --path {path!r}"
            )
        for node in nodes:
            found = node.value(slot)
            if found is not None:
                return found
        self._refuse_another_phase(path, slot, wanted)
        raise nothing_matched(
            f"slot of {path or '(root)'}", slot, (view.slot for view in nodes[0].slots)
        )

    def _refuse_another_phase(self, path: str, slot: str, wanted: Phase) -> None:
        """Raise where the slot is in other phases of the path alone; say in which."""
        phases = {
            node.phase
            for node in self.walk()
            if node.path == path and any(view.slot == slot for view in node.slots)
        }
        if phases and wanted not in phases:
            words = sorted(phase.word for phase in phases)
            raise SelectionError(
                f"{path or '(root)'} has no {slot} in phase {wanted.word}: it has it in "
                f"{' and '.join(words)}; ask with phase={words[0]!r}"
            )

    def __repr__(self) -> str:
        return f"Trace({self.path}: {extent(self)}, {state(self)})"


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
    path: str | os.PathLike[str] | None = None,
    *,
    wait_s: float = 60.0,
    progress: Progress | None = None,
) -> Trace:
    """Open a trace folder.

    A folder without trace.json is assembled in memory from what the ranks have sent so far, and
    says so (`is_written`, `is_live`); where every rank has ended and a collector is writing the
    tree, it is waited for.

    Args:
        path: the folder, or the trace.json in it; default the one this is inside of, or the newest
            rankscope-* folder here.
        wait_s: how long to wait for a collector that is finishing.
        progress: told what is being done, for anything that takes long.

    Raises:
        FolderError: no such folder, or an empty one.
        TraceError: not a trace, or a damaged one.
        TraceVersionError: a newer format than this reader knows.
    """
    folder = newest_trace() if path is None else Path(path)
    if folder.name == TRACE_NAME and not folder.is_dir():
        folder = folder.parent
    if folder.is_file():
        raise FolderError(f"{folder}: is a file; give the trace folder that rankscope run named")
    if not folder.is_dir():
        raise FolderError(
            f"{folder}: no such folder; give the trace folder that rankscope run named"
        )
    wait_for_collector(folder, wait_s, progress)
    if (folder / TRACE_NAME).exists():
        return _understood(folder, lambda: Trace(TraceFiles(folder), folder))
    from rankscope.assembly.sources import find_streams
    from rankscope.tree.build import assemble  # slow to import; a finished tree needs neither
    from rankscope.tree.unfinished import is_at_work

    sources = find_streams([folder])
    if not sources:
        if (folder / TRACE_NAME).exists():  # finished between the two looks
            return _understood(folder, lambda: Trace(TraceFiles(folder), folder))
        if not any(folder.iterdir()):
            raise FolderError(f"{folder}: is empty; nothing has been traced into it yet")
        raise TraceError(
            f"{folder}: not a trace: it holds neither {TRACE_NAME} nor records in {REPLICA_FOLDER}/"
            "; ranks of a job record from its first forward on"
        )
    records = RecordSource(assemble(sources, progress=progress), folder)
    at_work = is_at_work(folder, records.head["run"])
    return Trace(records, folder, is_live=at_work, is_written=False)


def _understood(folder: Path, read: Any) -> Trace:
    try:
        trace: Trace = read()
    except UNREADABLE as error:
        raise TraceError(
            f"{folder / TRACE_NAME}: {type(error).__name__} {error}: the trace is damaged"
        ) from error
    return trace


def _meshes(data: Mapping[str, Any]) -> tuple[Mesh, ...]:
    axes, shape = tuple(data["axes"]), tuple(data["shape"])
    return tuple(Mesh(axes=axes, shape=shape, ranks=tuple(ranks)) for ranks in data["over"])


def _named(kind: type[Phase] | type[Mode], what: str, given: Any) -> Any:
    """Return the phase or mode a caller named.

    Raises:
        SelectionError: there is none of that name.
    """
    if given is None or isinstance(given, kind):
        return given
    try:
        return kind[str(given).upper()]
    except KeyError:
        known = ", ".join(item.word for item in kind)
        raise SelectionError(f"no {what} is called {given!r}: choose from {known}") from None
