"""A trace that was assembled in memory: its head, and its steps as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.interning import Description, Vocabulary
from rankscope.assembly.nodes import Merged
from rankscope.assembly.tables import Tables
from rankscope.chunks.tensorfiles import TensorRecords
from rankscope.record.call import CallStatus, Mode
from rankscope.record.descriptions import TensorFacts
from rankscope.record.phases import Phase
from rankscope.record.statistics import STATISTICS
from rankscope.record.streams import StreamId
from rankscope.tree.step import LazyColumns, StepColumns, StepHead, StepTexts

__all__ = ["Document"]

Array = NDArray[Any]
_PLACED = sorted(Phase.having(lambda facts: facts.has_micro_batches))
_PLAIN = (*(each.name for each in STATISTICS), "hash", "sketch", "reference", "flags")
_KINDS = ("paths", "modules", "slots", "tensors", "errors", "collectives", "phases")


@dataclass(kw_only=True, eq=False)
class Document:
    """A whole trace in memory; the columns of a step are made when they are asked for."""

    run: dict[str, Any]
    completeness: dict[str, Any]
    tables: Tables
    merged: Merged
    vocabulary: Vocabulary
    paths: list[str]
    rank_of_stream: NDArray[np.int64]
    clock_offsets: NDArray[np.int64]
    """Per stream, what to add to its time_ns to get wall-clock time."""
    notes: dict[tuple[int, bool, int, int], list[dict[str, Any]]]
    """Per group, what ranks noted about the step."""
    tensors: Mapping[StreamId, TensorRecords]
    """Of the streams that kept full tensors."""
    took_all: bool = True
    """False where records were set aside: their bytes say more than the tree."""
    began_ns: int
    """Wall clock of the first call of the run: what `start_us` counts from."""

    @property
    def head(self) -> dict[str, Any]:
        """Who ran what, and how much of it is here."""
        return {"run": self.run, "completeness": self.completeness}

    def faults(self) -> Iterator[str]:
        """Yield nothing: what is wrong with the records stands beside their rank."""
        yield from ()

    @cached_property
    def heads(self) -> list[StepHead]:
        """What identifies each group of nodes: setup, then the steps."""
        return [
            StepHead(
                is_setup=is_setup,
                mode=Mode(mode),
                step=step,
                incarnation=incarnation,
                notes=tuple(self.notes.get((incarnation, is_setup, mode, step), ())),
            )
            for incarnation, is_setup, mode, step in self.merged.groups
        ]

    def step(self, group: int) -> StepColumns:
        """Return the columns of a group."""
        merged, texts, first_text = self.merged, *self._texts
        first, last = np.searchsorted(merged.group, [group, group + 1]).tolist()
        calls = slice(*merged.call_start[[first, last]].tolist())
        values = slice(*np.searchsorted(merged.value_node, [first, last]).tolist())
        made = {
            **self._of_nodes(first, last, first_text),
            **self._of_calls(calls, first, first_text),
            **self._of_values(values, first, first_text),
            **self._of_failures(first, last, first_text),
        }
        return StepColumns(
            head=self.heads[group],
            columns=LazyColumns(made),
            texts=texts,
            began_ns=self.began_ns,
            first_value=values.start,
            first_call=calls.start,
        )

    def counts(self, group: int) -> dict[str, int]:
        """Return how many rows of "values", "calls" and "samples" a group has."""
        first, last = np.searchsorted(self.merged.group, [group, group + 1]).tolist()
        begin, end = np.searchsorted(self.merged.value_node, [first, last]).tolist()
        order, tables = self.merged.order[begin:end], self.tables
        has_samples = tables.sample_start[order] >= 0
        calls = self.merged.call_start[[first, last]].tolist()
        return {
            "values": end - begin,
            "calls": calls[1] - calls[0],
            "samples": int(tables.sample_count[order][has_samples].sum()),
        }

    @cached_property
    def _texts(self) -> tuple[StepTexts, dict[str, int]]:
        """The texts of all groups, and the number of the first of each kind."""
        known = self.vocabulary
        lists: list[list[Any]] = [
            self.paths,
            known.modules.items,
            known.slots.items,
            [_facts(each) for each in known.descriptions.items],
            known.texts.items,
            known.collectives.items,
            [phase.word for phase in Phase],
        ]
        firsts, items = {}, list[object]()
        for kind, listed in zip(_KINDS, lists):
            firsts[kind] = len(items)
            items += listed
        return StepTexts(items), firsts

    def _of_nodes(self, first: int, last: int, texts: dict[str, int]) -> dict[str, Any]:
        merged, rows = self.merged, slice(first, last)
        heads = merged.calls.chosen(merged.call_start[first:last])
        parent = merged.parent[rows]
        is_placed = np.isin(heads["phase"], _PLACED)
        return {
            "nodes.id": lambda: merged.identity[rows],
            "nodes.parent": lambda: np.where(parent >= 0, parent - first, -1),
            "nodes.path": lambda: heads["path"] + np.int32(texts["paths"]),
            "nodes.phase": lambda: heads["phase"].astype(np.int32) + np.int32(texts["phases"]),
            "nodes.micro_batch": lambda: np.where(is_placed, heads["micro_batch"], -1),
            "nodes.ordinal": lambda: heads["ordinal"],
            "nodes.of_ordinal": lambda: merged.forward_ordinal[rows],
            "nodes.graph_task": lambda: heads["pass"],
        }

    def _of_calls(self, rows: slice, first_node: int, texts: dict[str, int]) -> dict[str, Any]:
        merged, calls = self.merged, self.merged.calls.chosen(rows)
        node = merged.call_start.searchsorted(np.arange(rows.start, rows.stop), "right") - 1
        return {
            "calls.node": lambda: node - first_node,
            "calls.rank": lambda: self.rank_of_stream[calls["stream"]].astype(np.int32),
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

    def _of_values(self, rows: slice, first_node: int, texts: dict[str, int]) -> dict[str, Any]:
        merged, tables, order = self.merged, self.tables, self.merged.order[rows]
        stream = merged.value_stream[rows]

        def plain(name: str) -> Callable[[], Array]:
            return lambda: tables.values[name][order]

        starts = tables.sample_start[order]
        counts = np.where(starts >= 0, tables.sample_count[order], 0)
        ends = np.cumsum(counts)

        def samples() -> Array:
            rows = np.arange(int(counts.sum())) + np.repeat(starts - ends + counts, counts)
            found: Array = tables.samples[rows]
            return found

        return {
            "values.node": lambda: merged.value_node[rows] - first_node,
            "values.slot": lambda: tables.slot[order] + np.int32(texts["slots"]),
            "values.tensor": lambda: tables.description[order] + np.int32(texts["tensors"]),
            "values.rank": lambda: self.rank_of_stream[stream].astype(np.int32),
            "values.digested": lambda: tables.has_digest[order],
            **{f"values.{name}": plain(name) for name in _PLAIN},
            "values.time_ns": lambda: tables.values["time_ns"][order] + self.clock_offsets[stream],
            "values.chunk": lambda: tables.chunk[order],
            "values.sample_row": lambda: np.where(starts >= 0, ends - counts, -1),
            "values.sample_count": lambda: tables.sample_count[order],
            "values.sample_dim": lambda: tables.sample_dim[order],
            "samples.sketch": samples,
        }

    def _of_failures(self, first: int, last: int, texts: dict[str, int]) -> dict[str, Any]:
        found = np.array(self._failures, np.int64).reshape(-1, 3)
        own = found[(found[:, 0] >= first) & (found[:, 0] < last)]
        return {
            "failures.node": lambda: own[:, 0] - first,
            "failures.rank": lambda: own[:, 1].astype(np.int32),
            "failures.text": lambda: _numbered(own[:, 2].astype(np.int32), texts["errors"]),
        }

    @cached_property
    def _failures(self) -> list[tuple[int, int, int]]:
        """Node, rank and text of what failed inside rankscope, by node; found by stream, sequence
        and phase of the call."""
        calls = self.tables.calls
        wanted: dict[tuple[int, int, int], list[int]] = {}
        for stream, row, text in self.tables.errors:
            if row >= 0:
                key = (stream, int(calls["sequence"][row]), int(calls["phase"][row]))
                wanted.setdefault(key, []).append(text)
        merged = self.merged.calls
        found = []
        for (stream, sequence, phase), texts in wanted.items():
            is_it = (merged["stream"] == stream) & (merged["sequence"] == sequence)
            for row in np.flatnonzero(is_it & (merged["phase"] == phase)).tolist():
                node = int(self.merged.call_start.searchsorted(row, "right")) - 1
                rank = int(self.rank_of_stream[stream])
                found += [(node, rank, text) for text in texts]
        return sorted(found, key=lambda each: each[0])


def _numbered(column: Array, first: int) -> Array:
    """Return numbers of texts, -1 for none."""
    found: Array = np.where(column >= 0, column + np.int32(first), np.int32(-1))
    return found


def _facts(description: Description) -> TensorFacts:
    piece, family = description.piece, description.family
    return TensorFacts(
        dtype=description.dtype,
        device=description.device,
        shape=piece.shape,
        global_shape=piece.global_shape,
        source=piece.layout.source.value,
        mesh=family.name if family is not None else "",
        placements=tuple(piece.layout.by_axis().items()) if family is not None else (),
        ranges=piece.ranges,
        note=description.note,
        requires_grad=description.requires_grad,
    )
