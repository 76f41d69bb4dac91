"""Nodes as the JSON data of docs/trace-format.md: what people open."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_text
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.record.value import ValueFlag
from rankscope.record.wholestatistics import Combined
from rankscope.tree.digests import digest_rows
from rankscope.tree.jsontext import number, statistic
from rankscope.tree.slotview import SlotView, flag_words
from rankscope.tree.step import StepColumns
from rankscope.tree.views import Node, Step

__all__ = ["nodes_data"]

Data = dict[str, Any]


def nodes_data(step: Step) -> list[Data]:
    """Return the outermost nodes of a step as JSON data, children inside."""
    tops = step.fresh()
    if not tops:
        return []
    made = _NodeData(tops[0].step)
    return [made.node(node) for node in tops]


class _NodeData:
    """Makes the data of one step; numbers leave numpy by column, for all of it at once."""

    def __init__(self, step: StepColumns) -> None:
        self._step = step
        self._ids: list[int] = step["nodes.id"].tolist()
        heads = step.fold_start[:-1]
        is_digested = step["values.digested"][heads].tolist()
        digests = _digests(digest_rows(step, heads)) if any(is_digested) else itertools.repeat({})
        self._digests = [each if has else None for has, each in zip(is_digested, digests)]
        starts = step.fold_start.tolist()
        names = ("tensor", "flags", "sample_dim", "sample_count", "sample_row")
        self._folds = [
            *zip(starts, starts[1:], *(step[f"values.{n}"][heads].tolist() for n in names))
        ]
        self._entry_folds: list[int] = step.entry_folds.tolist()
        flags = step["values.flags"]
        self._has_tensors = bool(
            step["values.reference"].any() or (flags & int(ValueFlag.NOT_KEPT)).any()
        )

    def node(self, node: Node) -> Data:
        """Return one node with all that is in it."""
        step, row = self._step, node.row
        lists, texts = step.lists, step.texts
        path, name = texts.text(lists.path[row]), texts.module(lists.module[row])
        found: Data = {"id": f"{self._ids[row]:016x}", "path": path}
        if name.raw_path != path:
            found["raw_path"] = name.raw_path
        found["class"] = name.class_name
        if not step.is_one_module[row] and node.classes:
            found["classes"] = [
                {"ranks": ranks_text(ranks), "class": name} for ranks, name in node.classes
            ]
        if name.wrappers:
            found["wrappers"] = list(name.wrappers)
        if node.is_opaque:
            found["opaque"] = True
        phase, micro_batch = texts.text(lists.phase[row]), lists.micro_batch[row]
        found |= {
            "phase": phase,
            "micro_batch": None if micro_batch < 0 else micro_batch,
            "ordinal": lists.ordinal[row],
        }
        is_backward = phase == Phase.BACKWARD.word
        if is_backward and (node.graph_task or node.ordinal != node.of_ordinal):
            found |= {"of_ordinal": node.of_ordinal, "graph_task": node.graph_task}
        issued = node.collectives if phase == Phase.COLLECTIVE.word else ()
        if len(issued) == 1:
            found["collective"] = dict(issued[0][1])
        elif issued:
            found["collectives"] = [{"ranks": ranks, **each} for ranks, each in issued]
        found |= {"ranks": node.ranks_text, "status": node.status}
        if not lists.has_returned[row]:
            found["outcomes"] = [
                {"ranks": ranks_text(each.ranks), "status": each.status}
                | ({"error": each.error} if each.error else {})
                for each in node.outcomes
            ]
        if row in step.failures:
            found["errors"] = [
                {"ranks": ranks_text(each.ranks), "error": each.error} for each in node.errors
            ]
        found["time"] = node.time._asdict()
        found["slots"] = [self._slot(slot) for slot in node.slots]
        found["children"] = [self.node(child) for child in node.children]
        return found

    def _slot(self, slot: SlotView) -> Data:
        facts = slot.facts
        layout: Data = {"source": facts.source}
        if facts.mesh:
            layout |= {"mesh": facts.mesh, "placements": dict(facts.placements)}
        found: Data = {
            "slot": slot.slot,
            "ranks": self._step.ranks_text(slot.ranks),
            "dtype": facts.dtype,
            "device": facts.device,
            "shape": None if facts.global_shape is None else list(facts.global_shape),
            "layout": layout,
        }
        if slot.disagreement:
            found["disagree"] = list(slot.disagreement)
        found["rows"] = self._step.entry_start[slot.entry : slot.entry + 2].tolist()
        if self._has_tensors:
            lists = {"kept": slot.references(), "not_kept": slot.not_kept}
            found |= {name: ranks_text(ranks) for name, ranks in lists.items() if ranks}
        first, last = self._entry_folds[slot.entry : slot.entry + 2]
        found["values"] = [self._fold(number) for number in range(first, last)]
        combined = slot.combined
        if combined:
            found["combined"] = [_combined(each) for each in combined]
        return found

    def _fold(self, number: int) -> Data:
        begin, end, tensor, bits, dim, count, row = self._folds[number]
        facts, flags, digest = (
            self._step.texts.tensor(tensor),
            flag_words(bits),
            self._digests[number],
        )
        ranks = self._step.ranks("values", slice(begin, end))
        found: Data = {"ranks": self._step.ranks_text(ranks), "shape": list(facts.shape)}
        if facts.requires_grad:
            found["requires_grad"] = True
        if flags:
            found["flags"] = list(flags)
        if facts.note is not None:
            found["note"] = facts.note
        if facts.ranges is not None and facts.shape != facts.global_shape:
            found["ranges"] = [[list(each) for each in dim] for dim in facts.ranges]
        if digest is not None:
            found["digest"] = digest
        if row >= 0:
            found["samples"] = {"dim": dim, "count": count, "row": row}
        return found


def _digests(rows: NDArray[Any]) -> Iterable[Data]:
    """Yield the numbers of each row."""
    columns: list[list[Any]] = [rows[name].tolist() for name in COUNTS]
    for name in NUMBERS:
        column = rows[name].tolist()
        for odd in np.flatnonzero(~np.isfinite(rows[name])).tolist():
            column[odd] = statistic(column[odd])
        columns.append(column)
    sketches = rows["sketch"].tolist()
    for odd in np.flatnonzero(~np.isfinite(rows["sketch"]).all(axis=1)).tolist():
        sketches[odd] = [number(s) for s in sketches[odd]]
    columns += [[f"{value:016x}" for value in rows["hash"].tolist()], sketches]
    names = (*COUNTS, *NUMBERS, "hash", "sketch")
    return (dict(zip(names, row)) for row in zip(*columns))


def _combined(combined: Combined) -> Data:
    result: Data = {"ranks": ranks_text(combined.ranks)}
    if combined.note is not None:
        result |= combined.note.as_json()
    if not combined.is_known:
        return result | {"digest": None}
    digest: Data = {name: combined.number(name) for name in COUNTS}
    for name in NUMBERS:
        value = combined.number(name)
        digest[name] = None if value is None else statistic(value)
    digest["sketch"] = None if combined.sketch is None else [number(s) for s in combined.sketch]
    return result | {"digest": digest}
