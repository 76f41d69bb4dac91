"""A finished trace folder, and whether one is about to be finished."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import rankscope
from rankscope.errors import TraceError, TraceVersionError
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

if TYPE_CHECKING:
    from rankscope.chunks.tensorfiles import TensorRecords
    from rankscope.record.streams import StreamId

__all__ = ["TraceFiles", "TraceSource", "wait_for_collector"]

_FORMAT = re.compile(r"rankscope\.(trace|nodes)/(\d+)")
_NEWEST_FORMAT = 1
_NODES_FILE = re.compile(r"steps/\d{6}\.json")
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


class TraceFiles:
    """A finished trace folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.head: Mapping[str, Any] = _load(folder / TRACE_NAME, "trace")
        listed = [
            (kind == "setup", group) for kind in ("setup", "steps") for group in self.head[kind]
        ]
        self.groups: list[tuple[bool, dict[str, Any]]] = listed

    def file(self, group: int) -> Path:
        """Where the nodes of a group are.

        Raises:
            TraceError: the file named is none that a trace has.
        """
        name = str(self.groups[group][1].get("nodes_file", TRACE_NAME))
        if name != TRACE_NAME and not _NODES_FILE.fullmatch(name):
            raise TraceError(f"{self._folder}: {name!r} is no nodes file: the trace is damaged")
        return self._folder / name

    def nodes(self, group: int) -> list[dict[str, Any]]:
        """Return the nodes of a group, from its own file where it has one."""
        head, file = self.groups[group][1], self.file(group)
        nodes = (_load(file, "nodes") if "nodes_file" in head else head).get("nodes")
        if not isinstance(nodes, list):
            raise TraceError(f"{file}: has no list of nodes: the trace is damaged")
        return nodes

    def columns(self) -> Columns:
        """Return the value columns, mapped."""
        from rankscope.tree.columns import map_columns  # numpy: a small tree is shown without

        return map_columns(self._folder / self.head["storage"]["values"].replace("/", ""))

    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Return {}: the chunks of a finished trace need no records."""
        return {}


def _load(path: Path, kind: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is no JSON ({error}); the trace is damaged") from error
    found = _FORMAT.fullmatch(str(data.get("format"))) if isinstance(data, dict) else None
    if found is None or found[1] != kind:
        raise TraceError(
            f"{path}: no rankscope {kind}, or a damaged one: it names no rankscope.{kind} format"
        )
    if int(found[2]) > _NEWEST_FORMAT:
        run = data.get("run")
        maker = run.get("versions", {}).get("rankscope") if isinstance(run, dict) else None
        needed = f"rankscope {maker} or newer" if maker else "a newer rankscope"
        if maker == rankscope.__version__:  # between two releases
            needed = f"the rankscope {maker} that wrote it, a newer build than this one"
        raise TraceVersionError(
            f"{path}: format {found[0]}, this rankscope reads up to "
            f"rankscope.{kind}/{_NEWEST_FORMAT}; install {needed}"
        )
    checked: dict[str, Any] = data
    return checked


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
