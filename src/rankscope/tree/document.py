"""A trace that was assembled in memory: its head, and its steps as columns."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId
from rankscope.record.statistics import STATISTICS
from rankscope.spool.chunks.tensorfiles import TensorRecords
from rankscope.tree.assembly.calltable import CallTable
from rankscope.tree.assembly.declaredlayouts import declare_layouts, placed_meshes
from rankscope.tree.assembly.interning import Vocabulary
from rankscope.tree.assembly.markedlayouts import mark_layouts
from rankscope.tree.assembly.nodes import Merged, merge
from rankscope.tree.assembly.rankstreams import RankStream
from rankscope.tree.assembly.steprecords import Group, StepRecords
from rankscope.tree.assembly.tables import Tables, build_tables
from rankscope.tree.step import LazyColumns, StepColumns, StepHead, StepTexts

Array = NDArray[Any]
_PLACED: Final = sorted(Phase.having(lambda facts: facts.has_micro_batches))
_OWN: Final = (
    *(each.name for each in STATISTICS), "hash", "sketch", "digested", "flags", "reference",
    "chunk", "sample_count", "sample_dim",
)  # fmt: skip
"""Columns of values that nothing is done with."""
_KINDS: Final = ("paths", "modules", "slots", "tensors", "errors", "collectives", "phases")
_MOST_PARTS: Final = 4
"""Parts that are remembered: of a job that is looked at while it runs there are few."""


class Document:
    """A whole trace in memory. Its steps are put together, some at a time, when they are asked
    for: what ranks recorded of them lies in the records until then."""

    def __init__(
        self,
        *,
        run: dict[str, Any],
        completeness: dict[str, Any],
        streams: Sequence[RankStream],
        records: StepRecords,
        vocabulary: Vocabulary,
        notes: Mapping[Group, Sequence[Mapping[str, Any]]],
        began_ns: int,
    ) -> None:
        """Put nothing together yet. `run`, `completeness`: as docs/trace-format.md; `streams`: in
        the order of the vocabulary's lookups; `began_ns`: wall clock of the first call of the run,
        what `start_us` counts from."""
        self.run, self.completeness, self.began_ns = run, completeness, began_ns
        self.took_all = not any(stream.has_set_aside for stream in streams)
        """False where records were set aside: their bytes say more than the tree."""
        self.tensors: Mapping[StreamId, TensorRecords] = {
            s.stream: (s.tensors, s.definitions) for s in streams if len(s.tensors)
        }
        """Of the streams that kept full tensors."""
        self._records, self._vocabulary = records, vocabulary
        self._rank_of_stream = np.array([stream.stream.rank for stream in streams], np.int64)
        self._clock_offsets = np.array([stream.clock_offset_ns for stream in streams], np.int64)
        self._part = functools.lru_cache(_MOST_PARTS)(self._made_part)
        self._placed: list[NDArray[np.int32]] = []
        """Per part, what its values are, where layouts are known from beside the records."""
        self.heads = [
            StepHead(
                is_setup=group.is_setup,
                mode=Mode(group.mode),
                step=group.step,
                incarnation=group.incarnation,
                notes=tuple(notes.get(group, ())),
            )
            for group in records.groups
        ]
        """What identifies each group of nodes: setup, then the steps."""
        self._place_values(streams)

    @property
    def head(self) -> dict[str, Any]:
        """Who ran what, and how much of it is here."""
        return {"run": self.run, "completeness": self.completeness}

    def close(self) -> None:
        """Let the records go: nothing is asked of its steps any more."""
        self._records.close()
        self._part.cache_clear()

    def faults(self) -> Iterator[str]:
        """Yield nothing: what is wrong with the records stands beside their rank."""
        yield from ()

    def step(self, group: int) -> StepColumns:
        """Return the columns of a group."""
        number = self._records.part_of_group[group]
        part, texts, first_text = self._part(number), *self._texts
        merged, own = part.merged, group - bisect.bisect_left(self._records.part_of_group, number)
        first, last = np.searchsorted(merged.group, [own, own + 1]).tolist()
        calls = slice(*merged.call_start[[first, last]].tolist())
        values = slice(*np.searchsorted(merged.value_node, [first, last]).tolist())
        made = {
            **_of_nodes(part, first, last, first_text),
            **self._of_calls(part, calls, first, first_text),
            **self._of_values(part, values, first, first_text),
            **self._of_failures(part, first, last, first_text),
        }
        return StepColumns(
            head=self.heads[group], columns=LazyColumns(made), texts=texts, began_ns=self.began_ns
        )

    def _tables(self, number: int) -> Tables:
        return build_tables(self._records.streams(number), self._vocabulary)

    def _made_part(self, number: int) -> _MergedPart:
        tables = self._tables(number)
        if self._placed:
            tables.description = self._placed[number]
        return _MergedPart(tables, merge(tables, self._vocabulary))

    def _place_values(self, streams: Sequence[RankStream]) -> None:
        """Give values the layouts that no rank knew alone, for which calls of all steps are looked
        at."""
        if "layout" not in self.run and not any(stream.defined("mark") for stream in streams):
            return
        steps = [self._tables(number) for number in range(len(set(self._records.part_of_group)))]
        mark_layouts(steps, self._vocabulary, streams)
        declare_layouts(steps, self._vocabulary, self.run, self._rank_of_stream)
        self.run["meshes"] += placed_meshes(self._vocabulary)
        self._placed = [tables.description for tables in steps]

    @functools.cached_property
    def _texts(self) -> tuple[StepTexts, dict[str, int]]:
        """The texts of all groups, and the number of the first of each kind."""
        known = self._vocabulary
        lists: list[list[Any]] = [
            known.paths.items,
            known.modules.items,
            known.slots.items,
            [each.facts for each in known.descriptions.items],
            known.texts.items,
            known.collectives.items,
            [phase.word for phase in Phase],
        ]
        firsts, items = {}, list[object]()
        for kind, listed in zip(_KINDS, lists):
            firsts[kind] = len(items)
            items += listed
        return StepTexts(items), firsts

    def _of_calls(
        self, part: _MergedPart, rows: slice, first_node: int, texts: dict[str, int]
    ) -> dict[str, Any]:
        merged, calls = part.merged, part.merged.calls.chosen(rows)
        node = merged.call_start.searchsorted(np.arange(rows.start, rows.stop), "right") - 1
        return {
            "calls.node": lambda: node - first_node,
            "calls.rank": lambda: self._rank_of_stream[calls["stream"]].astype(np.int32),
            "calls.start_ns": lambda: calls["start"],
            "calls.duration_ns": lambda: np.where(
                calls["status"] == CallStatus.UNFINISHED, -1, calls["end"] - calls["start"]
            ),
            "calls.status": lambda: calls["status"],
            "calls.issued": lambda: calls["issued"],
            "calls.module": lambda: calls["module"] + np.int32(texts["modules"]),
            "calls.error": lambda: _numbered(calls["text"], texts["errors"]),
            "calls.collective": lambda: _numbered(calls["collective"], texts["collectives"]),
            "calls.number": lambda: calls["number"],
        }

    def _of_values(
        self, part: _MergedPart, rows: slice, first_node: int, texts: dict[str, int]
    ) -> dict[str, Any]:
        merged, tables = part.merged, part.tables
        stream = merged.value_stream[rows]

        def own(name: str) -> Callable[[], Array]:
            return lambda: part.column(name, rows)

        starts, counts = part.column("sample_start", rows), part.column("sample_count", rows)
        ends = np.cumsum(counts)

        def samples() -> Array:
            rows = np.arange(int(counts.sum())) + np.repeat(starts - ends + counts, counts)
            return np.asarray(tables.samples[rows])

        return {
            "values.node": lambda: merged.value_node[rows] - first_node,
            "values.slot": lambda: part.column("slot", rows) + np.int32(texts["slots"]),
            "values.tensor": lambda: part.column("description", rows) + np.int32(texts["tensors"]),
            "values.rank": lambda: self._rank_of_stream[stream].astype(np.int32),
            **{f"values.{name}": own(name) for name in _OWN},
            "values.time_ns": lambda: part.column("time_ns", rows) + self._clock_offsets[stream],
            "values.sample_row": lambda: np.where(starts >= 0, ends - counts, -1),
            "samples.sketch": samples,
        }

    def _of_failures(
        self, part: _MergedPart, first: int, last: int, texts: dict[str, int]
    ) -> dict[str, Any]:
        found = part.merged.failures
        own = found[(found[:, 0] >= first) & (found[:, 0] < last)]
        return {
            "failures.node": lambda: own[:, 0] - first,
            "failures.rank": lambda: self._rank_of_stream[own[:, 1]].astype(np.int32),
            "failures.text": lambda: _numbered(own[:, 2].astype(np.int32), texts["errors"]),
        }


class _MergedPart:
    def __init__(self, tables: Tables, merged: Merged) -> None:
        self.tables, self.merged = tables, merged
        tables.calls, tables.call = CallTable.zeros(0), np.empty(0, np.int64)  # merged has them
        self._columns: dict[str, Array] = {}

    def column(self, name: str, rows: slice) -> Array:
        """Return rows of a column of values, in order. Where they are all of it, as of a large
        step, nothing here keeps it."""
        column = self._columns.get(name)
        if column is None:
            column = self.tables.put_in_order(name, self.merged.place)
            if rows.stop - rows.start < len(column):
                self._columns[name] = column
        return column[rows]


def _of_nodes(part: _MergedPart, first: int, last: int, texts: dict[str, int]) -> dict[str, Any]:
    merged, rows = part.merged, slice(first, last)
    heads = merged.heads.chosen(rows)
    parent = merged.parent[rows]
    is_placed = np.isin(heads["phase"], _PLACED)
    return {
        "nodes.id": lambda: merged.identity[rows],
        "nodes.parent": lambda: np.where(parent >= 0, parent - first, -1),
        "nodes.path": lambda: heads["path"] + np.int32(texts["paths"]),
        "nodes.phase": lambda: heads["phase"].astype(np.int32) + np.int32(texts["phases"]),
        "nodes.micro_batch": lambda: np.where(is_placed, heads["micro_batch"], -1),
        "nodes.ordinal": lambda: heads["ordinal"],
        "nodes.of_ordinal": lambda: heads["forward_ordinal"],
        "nodes.graph_task": lambda: heads["pass"],
    }


def _numbered(column: Array, first: int) -> Array:
    """Return numbers of texts, -1 for none."""
    found: Array = np.where(column >= 0, column + np.int32(first), np.int32(-1))
    return found
