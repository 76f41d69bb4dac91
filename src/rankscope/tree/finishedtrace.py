"""A finished trace folder, and whether one is about to be finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rankscope.run.filenames import (
    CELLS_SUFFIX,
    COLLECTOR_LOCK_NAME,
    COLLECTOR_LOG_NAME,
    REPLICA_FOLDER,
    TRACE_NAME,
    Progress,
)
from rankscope.run.folders import is_held
from rankscope.tree.older import OlderTrace, is_older
from rankscope.tree.step import StepColumns, StepHead
from rankscope.tree.stepfile import StepFiles, known_entries
from rankscope.tree.tracejson import load_json
from rankscope.tree.views import Trace, TraceSource

if TYPE_CHECKING:
    from rankscope.record.ranks import StreamId
    from rankscope.spool.chunks.tensorfiles import TensorRecords
    from rankscope.tree.document import Document

_POLL_S = 0.1
_OF_A_COLLECTOR = (COLLECTOR_LOG_NAME, COLLECTOR_LOCK_NAME, REPLICA_FOLDER)
_FIRST_S = 10.0
"""How long the first records may take to come."""


_Place: TypeAlias = "Mapping[str, Any] | tuple[Document | OlderTrace, int]"
"""The entry of a step, or who holds it and which of its steps it is."""


class WrittenSteps:
    """Steps that lie in step files, and others in memory behind them."""

    def __init__(
        self,
        folder: Path,
        head: Mapping[str, Any],
        entries: Sequence[Mapping[str, Any]],
        began_ns: int,
        others: Sequence[Document | OlderTrace] = (),
    ) -> None:
        """Open no file yet. `head`: {"run", "completeness"}; `began_ns`: wall clock of the first
        call of the run; `others` hold steps that are not written. KeyError, TypeError, ValueError:
        an entry is none."""
        self.head, self._folder, self._began_ns, self._others = head, folder, began_ns, others
        self._files = StepFiles(folder, int(head["run"]["world_size"]))
        known, self.passed_over = known_entries(entries)
        listed: list[tuple[StepHead, _Place]] = [*known]
        listed += [(found, (other, i)) for other in others for i, found in enumerate(other.heads)]
        if others:  # what is finished is in order
            listed.sort(key=lambda each: (not each[0].is_setup, each[0].name))
        self.heads: Sequence[StepHead] = [found for found, _ in listed]
        self._places = [place for _, place in listed]

    def file(self, group: int) -> Path:
        """Return what a step is read from."""
        place = self._places[group]
        return self._folder if isinstance(place, tuple) else self._files.path(place)

    def step(self, group: int) -> StepColumns:
        """Return a step; TraceError: its file is damaged, or not there."""
        place = self._places[group]
        if isinstance(place, tuple):
            return place[0].step(place[1])
        return self._files.step(place, self.heads[group], self._began_ns)

    @property
    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """What the records say of chunks that are still written."""
        return {key: each for other in self._others for key, each in other.tensors.items()}

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with each file that steps lie in."""
        yield from self._files.faults([p for p in self._places if not isinstance(p, tuple)])
        for other in self._others:
            yield from other.faults()


def trace_of(document: Document, folder: Path, **more: Any) -> Trace:
    """Return what a document holds as if it were opened from a folder; `more` as of `Trace`."""
    source = WrittenSteps(folder, document.head, (), document.began_ns, [document])
    return Trace(source, folder, is_written=False, **more)


def trace_files(folder: Path) -> TraceSource:
    """Return a finished trace folder, of any format. TraceError: its trace.json is damaged;
    TraceVersionError: of a newer format."""
    head = load_json(folder / TRACE_NAME, "trace")
    if is_older(head):
        return OlderTrace.of(folder, head)
    return WrittenSteps(folder, head, [*head["setup"], *head["steps"]], int(head["began_ns"]))


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
    """True where no record has come, and a collector holds the folder or is about to: the folder
    was made for one just now."""
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
