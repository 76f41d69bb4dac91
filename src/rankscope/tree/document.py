"""A trace as the JSON data of docs/trace-format.md: groups of nodes from the merged tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.callfacts import CallFacts, NodeFacts
from rankscope.assembly.interning import Vocabulary
from rankscope.assembly.nodes import Merged
from rankscope.assembly.tables import Tables
from rankscope.chunks.tensorfiles import TensorRecords
from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.record.ranklists import RankTexts, ranks_text
from rankscope.record.streams import StreamId
from rankscope.tree.slotdata import SlotData

__all__ = ["Document"]

_PHASE_WORDS = {int(phase): phase.word for phase in Phase}
_PLACED_PHASES = Phase.having(lambda facts: facts.has_micro_batches)


@dataclass(slots=True, kw_only=True)
class Document:
    """A whole trace in memory, its nodes rendered group by group on demand."""

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
    first_row: int = 0
    """Row of the first value among those of the whole trace, where others were written before."""
    first_sample: int = 0
    """The same for rows of samples."""
    _renderers: dict[tuple[bool, int, int], _Renderer] = field(
        default_factory=dict, init=False, repr=False
    )

    def heads(self) -> list[dict[str, Any]]:
        """Return what identifies each group: {"incarnation", "mode", "step"}; setup has incarnation
        alone."""
        return [_group_head(group, self.notes.get(group, [])) for group in self.merged.groups]

    def is_setup(self, group: int) -> bool:
        """True where the group holds setup nodes."""
        return self.merged.groups[group][1]

    def nodes(self, group: int, *, is_compact: bool = False) -> list[dict[str, Any]]:
        """Return the top nodes of a group as JSON data, children inside."""
        key = (is_compact, self.first_row, self.first_sample)
        if key not in self._renderers:
            self._renderers[key] = _Renderer(self, is_compact=is_compact)
        return self._renderers[key].group(group)

    def json_bytes_estimate(self) -> int:
        """Return roughly how large the nodes are as JSON with every rank's numbers in it."""
        nodes, folds = len(self.merged.parent), len(self.merged.fold_start) - 1
        return nodes * 250 + (len(self.merged.entry_start) - 1) * 200 + folds * 450


def _group_head(group: tuple[int, bool, int, int], notes: list[dict[str, Any]]) -> dict[str, Any]:
    incarnation, is_setup, mode, step = group
    if is_setup:
        return {"incarnation": incarnation}
    head: dict[str, Any] = {"mode": Mode(mode).word, "step": step, "incarnation": incarnation}
    return head | ({"notes": notes} if notes else {})


class _Renderer:
    """Turns rows of the merged tables into JSON data."""

    def __init__(self, document: Document, *, is_compact: bool) -> None:
        merged = document.merged
        self._document = document
        self._merged = merged
        self._facts = CallFacts(merged, document.rank_of_stream, document.began_ns)
        self._texts = RankTexts()
        self._call_ranks: NDArray[np.int64] = document.rank_of_stream[merged.calls["stream"]]
        self._slots = SlotData(
            document.tables, merged, document.vocabulary, document.rank_of_stream, self._texts,
            is_compact=is_compact, first_row=document.first_row, first_sample=document.first_sample,
        )  # fmt: skip
        self._names: dict[tuple[int, int], dict[str, Any]] = {}
        self._errors: dict[int, list[tuple[int, int]]] = {}
        if any(row >= 0 for _, row, _ in document.tables.errors):
            self._collect_errors()

    def _collect_errors(self) -> None:
        """Find the nodes of the calls that errors name: by stream, sequence and phase."""
        calls = self._document.tables.calls
        wanted: dict[tuple[int, int, int], list[int]] = {}
        for stream, row, text in self._document.tables.errors:
            if row >= 0:
                key = (stream, int(calls["sequence"][row]), int(calls["phase"][row]))
                wanted.setdefault(key, []).append(text)
        merged = self._merged.calls
        node_of = np.repeat(np.arange(len(self._merged.parent)), np.diff(self._merged.call_start))
        for (stream, sequence, phase), texts in wanted.items():
            found = (merged["stream"] == stream) & (merged["sequence"] == sequence)
            for row in np.flatnonzero(found & (merged["phase"] == phase)).tolist():
                listed = self._errors.setdefault(int(node_of[row]), [])
                listed.extend((stream, text) for text in texts)

    def group(self, group: int) -> list[dict[str, Any]]:
        """Return the top nodes of a group, which stand behind each other."""
        first, last = np.searchsorted(self._merged.group, [group, group + 1]).tolist()
        start = int(self._merged.node_entries[first])
        entries = self._slots.entries(start, int(self._merged.node_entries[last]))
        rendered: list[dict[str, Any]] = []
        tops: list[dict[str, Any]] = []
        for facts in self._facts.rows(first, last):
            own = entries[facts.first_entry - start : facts.last_entry - start]
            rendered.append(self._node(facts, own))
            siblings = tops if facts.parent < 0 else rendered[facts.parent - first]["children"]
            siblings.append(rendered[-1])
        return tops

    def _node(self, facts: NodeFacts, slots: list[dict[str, Any]]) -> dict[str, Any]:
        path = self._document.paths[facts.path]
        is_placed = facts.micro_batch >= 0 and facts.phase in _PLACED_PHASES
        result: dict[str, Any] = {
            "id": f"{facts.identity:016x}",
            "path": path,
            **self._names_of(facts, path),
            "phase": _PHASE_WORDS[facts.phase],
            "micro_batch": facts.micro_batch if is_placed else None,
            "ordinal": facts.ordinal,
        }
        if facts.phase == Phase.BACKWARD and (
            facts.graph_task or facts.ordinal != facts.forward_ordinal
        ):
            result |= {"of_ordinal": facts.forward_ordinal, "graph_task": facts.graph_task}
        if facts.collective >= 0:
            result |= self._collectives(facts)
        result["ranks"] = self._texts.text(self._call_ranks[facts.first_call : facts.last_call])
        if facts.has_returned:
            result["status"] = CallStatus.RETURNED.word
        else:
            result |= self._outcome(facts)
        if facts.node in self._errors:
            result["errors"] = self._error_list(self._errors[facts.node])
        result["time"] = {
            "start_us": facts.start_us,
            "min_us": facts.min_us,
            "max_us": facts.max_us,
            "slowest": facts.slowest,
        }
        result["slots"] = slots
        result["children"] = []
        return result

    def _collectives(self, facts: NodeFacts) -> dict[str, Any]:
        """What a collective is, by ranks where they differ."""
        rows = slice(facts.first_call, facts.last_call)
        calls, ranks = self._merged.calls.chosen(rows), self._call_ranks[rows]
        keys = np.stack([calls["collective"].astype(np.int64), calls["number"]], axis=1)
        distinct, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        known = self._document.vocabulary.collectives.items
        found = {
            int(first[i]): {
                "ranks": ranks_text(ranks[inverse.reshape(-1) == i].tolist()),
                **known[kind].as_fields(),
                "sequence": number,
            }
            for i, (kind, number) in enumerate(distinct.tolist())
            if kind >= 0
        }
        if len(found) > 1:
            return {"collectives": [found[row] for row in sorted(found)]}
        (only,) = found.values()
        return {"collective": {name: value for name, value in only.items() if name != "ranks"}}

    def _names_of(self, facts: NodeFacts, path: str) -> dict[str, Any]:
        """What the module is called, beside its path."""
        if not facts.is_one_module:
            rows = slice(facts.first_call, facts.last_call)
            return self._name(self._merged.calls["module"][rows], self._call_ranks[rows], path)
        key = (facts.module, facts.path)
        if key not in self._names:
            self._names[key] = self._name(np.array([facts.module]), self._call_ranks[:1], path)
        return self._names[key]

    def _name(
        self, numbers: NDArray[np.int64], ranks: NDArray[np.int64], path: str
    ) -> dict[str, Any]:
        modules = self._document.vocabulary.modules.items
        names = {number: modules[number] for number in sorted(set(numbers.tolist()))}
        first = modules[int(numbers[0])]
        result: dict[str, Any] = {}
        if first.raw_path != path:
            result["raw_path"] = first.raw_path
        result["class"] = first.class_name
        if len({name.class_name for name in names.values()}) > 1:
            result["classes"] = [
                {
                    "ranks": ranks_text(ranks[numbers == number].tolist()),
                    "class": name.class_name,
                }
                for number, name in names.items()
            ]
        if first.wrappers:
            result["wrappers"] = list(first.wrappers)
        if any(name.opaque for name in names.values()):
            result["opaque"] = True
        return result

    def _outcome(self, facts: NodeFacts) -> dict[str, Any]:
        calls = self._merged.calls.chosen(slice(facts.first_call, facts.last_call))
        ranks = self._call_ranks[facts.first_call : facts.last_call]
        keys = np.stack([calls["status"].astype(np.int64), calls["text"].astype(np.int64)], axis=1)
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        words = [CallStatus.word_of(int(s)) for s, _ in distinct]
        if words == [CallStatus.RETURNED.word]:
            return {"status": words[0]}
        outcomes: list[dict[str, Any]] = []
        for i, (_, text) in enumerate(distinct.tolist()):
            outcome = {
                "ranks": ranks_text(ranks[inverse.reshape(-1) == i].tolist()),
                "status": words[i],
            }
            if text >= 0:
                outcome["error"] = self._document.vocabulary.texts.items[text]
            outcomes.append(outcome)
        return {"status": words[0] if len(set(words)) == 1 else "mixed", "outcomes": outcomes}

    def _error_list(self, errors: list[tuple[int, int]]) -> list[dict[str, Any]]:
        by_text: dict[int, list[int]] = {}
        for stream, text in errors:
            by_text.setdefault(text, []).append(int(self._document.rank_of_stream[stream]))
        texts = self._document.vocabulary.texts.items
        return [
            {"ranks": ranks_text(r), "error": texts[t] if t >= 0 else ""}
            for t, r in by_text.items()
        ]
