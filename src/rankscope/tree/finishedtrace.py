"""A finished trace folder, and whether one is about to be finished."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rankscope.errors import TraceError
from rankscope.run.filenames import (
    CELLS_SUFFIX,
    COLLECTOR_LOCK_NAME,
    COLLECTOR_LOG_NAME,
    COLLECTOR_NAME,
    REPLICA_FOLDER,
    TRACE_NAME,
    Progress,
)
from rankscope.run.folders import is_held
from rankscope.tree.digests import Columns
from rankscope.tree.stepfiles import listed_nodes, nodes_path, read_nodes, values_path
from rankscope.tree.tracejson import load_json

if TYPE_CHECKING:
    from rankscope.chunks.tensorfiles import TensorRecords
    from rankscope.record.streams import StreamId

__all__ = ["TraceFiles", "TraceSource", "columns_in", "wait_for_collector"]

_COUNTED_BY = {"values": "values.rank", "samples": "samples.sketch", "calls": "calls.rank"}
_POLL_S = 0.1
_OF_A_COLLECTOR = (COLLECTOR_NAME, COLLECTOR_LOG_NAME, COLLECTOR_LOCK_NAME, REPLICA_FOLDER)
_FIRST_S = 10.0
"""How long the first records may take to come."""


class TraceSource(Protocol):
    """Where a trace's data comes from."""

    head: Mapping[str, Any]
    """Everything but the nodes."""
    groups: list[tuple[bool, dict[str, Any]]]
    """is setup, head of each group of nodes."""

    def file(self, group: int) -> Path:
        """Return what a group was read from."""

    def nodes(self, group: int) -> list[dict[str, Any]]:
        """Return the nodes of a group."""

    def columns(self) -> Columns:
        """Return the value columns."""

    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Return what the records say of chunks that are still written."""

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with each file that nodes or columns lie in."""


class TraceFiles:
    """A finished trace folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.head: Mapping[str, Any] = load_json(folder / TRACE_NAME, "trace")
        listed = [
            (kind == "setup", group) for kind in ("setup", "steps") for group in self.head[kind]
        ]
        self.groups: list[tuple[bool, dict[str, Any]]] = listed

    def file(self, group: int) -> Path:
        """Where the nodes of a group are.

        Raises:
            TraceError: the file named is none that a trace has.
        """
        head = self.groups[group][1]
        return nodes_path(self._folder, head) if "nodes_file" in head else self._folder / TRACE_NAME

    def nodes(self, group: int) -> list[dict[str, Any]]:
        """Return the nodes of a group, from its own file where it has one."""
        head, file = self.groups[group][1], self.file(group)
        return read_nodes(file) if "nodes_file" in head else listed_nodes(head, file)

    @property
    def _values_files(self) -> list[dict[str, Any]]:
        values = self.head["storage"]["values"]
        return [{"file": values}] if isinstance(values, str) else values

    def columns(self) -> Columns:
        """Return the value columns, mapped."""
        return columns_in(self._folder, self._values_files, self.head["run"]["world_size"])

    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Return {}: the chunks of a finished trace need no records."""
        return {}

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with each file that nodes or columns lie in."""
        heads = [head for _, head in self.groups if "nodes_file" in head]
        world_size = self.head["run"]["world_size"]
        yield from file_faults(self._folder, heads, self._values_files, world_size)


def file_faults(
    folder: Path,
    heads: Iterable[Mapping[str, Any]],
    values: Iterable[Mapping[str, Any]],
    world_size: int,
) -> Iterator[str]:
    """Read files of a trace from begin to end, and yield what is wrong with each.

    Args:
        folder: the trace folder.
        heads: of the steps whose nodes lie in files of their own.
        values: {"file", "values", "samples", "calls"} of each values file, or the file alone.
        world_size: no rank is as high.
    """
    from rankscope.tree.columns import map_columns  # numpy: as below

    for head in heads:
        try:
            read_nodes(nodes_path(folder, head))
        except TraceError as error:
            yield str(error)
    for part in values:
        try:
            path = values_path(folder, part)
            found = map_columns(path, world_size, is_checked=True)
            for kind, column in _COUNTED_BY.items():
                if len(found[column]) != part.get(kind, len(found[column])):
                    raise TraceError(
                        f"{path}: {column} has {len(found[column])} rows, the trace says "
                        f"{part[kind]}: the file is damaged"
                    )
        except TraceError as error:
            yield str(error)


def columns_in(
    folder: Path,
    files: Sequence[Mapping[str, Any]],
    world_size: int,
    rest: Columns | None = None,
) -> Columns:
    """Return the value columns that lie in one file, or in several with rows counted through.

    Args:
        folder: the trace folder.
        files: {"file", "values", "samples", "calls"} of each; of a single one the name alone.
        world_size: no rank is as high.
        rest: columns in memory whose rows come behind.

    Raises:
        TraceError: one of them is none that a trace has; or damaged.
    """
    from rankscope.tree.columns import map_columns  # numpy: a small tree is shown without
    from rankscope.tree.joinedcolumns import join_columns

    paths = [values_path(folder, each) for each in files]
    if rest is None and len(paths) == 1:
        return map_columns(paths[0], world_size)
    made: list[Callable[[], Columns]] = [
        functools.partial(map_columns, path, world_size) for path in paths
    ]
    if rest is None:
        return join_columns(made, files)
    counts = {kind: len(rest[column]) for kind, column in _COUNTED_BY.items()}
    return join_columns([*made, lambda: rest], [*files, counts])


def wait_for_collector(
    folder: Path,
    wait_s: float,
    progress: Progress | None,
    is_about_to_end: Callable[[], bool] = lambda: False,
) -> None:
    """Return once trace.json is there, or nobody is about to write it.

    Where a collector is at work and nothing has come yet, records may be on their way from a job
    that was over quickly: that is waited for as well, but not long.

    Args:
        folder: the trace folder.
        wait_s: how long to wait at most.
        progress: told of the waiting.
        is_about_to_end: says what this folder alone does not, that a tree will come.
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
    """True where no record has come, and a collector holds the folder or is about to: the folder
    was made for one just now.
    """
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
