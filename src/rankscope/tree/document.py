"""A trace as the JSON data of docs/trace-format.md: groups of nodes from the merged tables."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import Mode, Phase
from rankscope.record.value import ValueFlag
from rankscope.spool.cells import CallStatus
from rankscope.tree.combine import Combined
from rankscope.tree.interning import Description, Interned, Vocabulary
from rankscope.tree.jsontext import number, statistic
from rankscope.tree.nodes import UNFOLDED_FLAGS, Merged
from rankscope.tree.ranks import ranks_text
from rankscope.tree.tables import UNFINISHED, Tables
from rankscope.tree.whole import WholeTensors

__all__ = ["Document", "flag_words", "node_id"]

_SHARED_FIELDS = ("dtype", "device", "global_shape", "source", "mesh", "placements")
_STATUS_WORDS = {int(s): s.name.lower() for s in CallStatus} | {UNFINISHED: "unfinished"}
_HIDDEN_FLAGS = ValueFlag.REUSED | ValueFlag.HAS_SAMPLES | ValueFlag.SUPERSEDES | ValueFlag.PYTHON
_PLACED_PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.COLLECTIVE)


def node_id(identity: int) -> str:
    """Return a node's id as the JSON spells it: the number in the columns, in hex."""
    return f"{identity:016x}"


@functools.lru_cache(maxsize=1024)
def flag_words(flags: int) -> tuple[str, ...]:
    """Return the words of a value's flags, without those that only say how it was obtained."""
    shown = flags & ~int(_HIDDEN_FLAGS)
    return tuple(flag.name.lower() for flag in ValueFlag if int(flag) & shown and flag.name)


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
    run_ids: tuple[str, ...]
    """Runs the records say they belong to; more than one is a mistake of whoever put them
    together."""
    notes: dict[tuple[int, bool, int, int], list[dict[str, Any]]]
    """Per group, what ranks noted about the step."""

    def heads(self) -> list[dict[str, Any]]:
        """Return what identifies each group: {"incarnation", "mode", "step"}; setup has incarnation
        alone."""
        return [_group_head(group, self.notes.get(group, [])) for group in self.merged.groups]

    def is_setup(self, group: int) -> bool:
        """True where the group holds setup nodes."""
        return self.merged.groups[group][1]

    def nodes(self, group: int, *, is_compact: bool = False) -> list[dict[str, Any]]:
        """Return the top nodes of a group as JSON data, children inside."""
        return _Renderer(self, is_compact=is_compact).group(group)

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
        self._document = document
        self._merged = document.merged
        self._is_compact = is_compact
        self._descriptions = document.vocabulary.descriptions.items
        self._whole = WholeTensors(self._descriptions, document.rank_of_stream)
        merged, tables = document.merged, document.tables
        self._ranks = document.rank_of_stream[merged.value_stream]
        self._description = tables.description[merged.order]
        self._has_digest = tables.has_digest[merged.order]
        self._sample_rows = tables.sample_start[merged.order]
        self._sample_counts = tables.sample_count[merged.order]
        self._sample_dims = tables.sample_dim[merged.order]
        self._slot = tables.slot[merged.order]
        local: Interned[object] = Interned()
        self._piece_of_description = np.array(
            [local.number((d.shape, d.note, d.requires_grad)) for d in self._descriptions], np.int64
        )
        self._texts: dict[bytes, str] = {}
        self._run_start = int(merged.calls["start"].min(initial=np.iinfo(np.int64).max))
        self._errors: dict[int, list[tuple[int, int]]] = {}
        if any(row >= 0 for _, row, _ in tables.errors):
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
        """Return the top nodes of a group."""
        numbers = np.flatnonzero(self._merged.group == group)
        rendered: dict[int, dict[str, Any]] = {}
        tops: list[dict[str, Any]] = []
        for node in numbers.tolist():
            rendered[node] = self._node(node)
            parent = int(self._merged.parent[node])
            (rendered[parent]["children"] if parent >= 0 else tops).append(rendered[node])
        return tops

    def _node(self, node: int) -> dict[str, Any]:
        merged = self._merged
        calls = merged.calls[merged.call_start[node] : merged.call_start[node + 1]]
        head = calls[0]
        phase = Phase(int(head["phase"]))
        path = self._document.paths[int(head["path"])]
        micro_batch = int(head["micro_batch"])
        result: dict[str, Any] = {
            "id": node_id(int(merged.identity[node])),
            "path": path,
            **self._names(calls, path),
            "phase": phase.word,
            "micro_batch": micro_batch if micro_batch >= 0 and phase in _PLACED_PHASES else None,
            "ordinal": int(head["ordinal"]),
        }
        if phase is Phase.BACKWARD and (head["pass"] or head["ordinal"] != head["forward_ordinal"]):
            result |= {"of_ordinal": int(head["forward_ordinal"]), "graph_task": int(head["pass"])}
        result["ranks"] = self._ranks_text(self._call_ranks(calls))
        result |= self._outcome(calls)
        if node in self._errors:
            result["errors"] = self._error_list(self._errors[node])
        result["time"] = self._time(calls)
        entries = range(int(merged.node_entries[node]), int(merged.node_entries[node + 1]))
        result["slots"] = self._slots(entries)
        result["children"] = []
        return result

    def _ranks_text(self, ranks: NDArray[np.int64]) -> str:
        """Fold ranks; the same few sets of them come again and again."""
        key = ranks.tobytes()
        found = self._texts.get(key)
        if found is None:
            found = self._texts[key] = ranks_text(ranks.tolist())
        return found

    def _call_ranks(self, calls: NDArray[Any]) -> NDArray[np.int64]:
        ranks: NDArray[np.int64] = self._document.rank_of_stream[calls["stream"]]
        return ranks

    def _names(self, calls: NDArray[Any], path: str) -> dict[str, Any]:
        modules = self._document.vocabulary.modules.items
        names = {int(m): modules[int(m)] for m in np.unique(calls["module"])}
        first = modules[int(calls["module"][0])]
        result: dict[str, Any] = {}
        if first.raw_path != path:
            result["raw_path"] = first.raw_path
        result["class"] = first.class_name
        if len({name.class_name for name in names.values()}) > 1:
            ranks = self._call_ranks(calls)
            result["classes"] = [
                {
                    "ranks": ranks_text(ranks[calls["module"] == number].tolist()),
                    "class": name.class_name,
                }
                for number, name in names.items()
            ]
        if first.wrappers:
            result["wrappers"] = list(first.wrappers)
        if any(name.opaque for name in names.values()):
            result["opaque"] = True
        return result

    def _outcome(self, calls: NDArray[Any]) -> dict[str, Any]:
        keys = np.stack([calls["status"].astype(np.int64), calls["text"].astype(np.int64)], axis=1)
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        words = [_STATUS_WORDS.get(int(s), "unknown") for s, _ in distinct]
        if words == ["returned"]:
            return {"status": "returned"}
        ranks = self._call_ranks(calls)
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

    def _time(self, calls: NDArray[Any]) -> dict[str, Any]:
        done = calls[calls["status"] != UNFINISHED]
        taken = (done["end"] - done["start"]) / 1e3
        slowest = int(taken.argmax()) if len(taken) else 0
        return {
            "start_us": round(float(calls["start"][0] - self._run_start) / 1e3, 1),
            "min_us": round(float(taken.min()), 1) if len(taken) else None,
            "max_us": round(float(taken.max()), 1) if len(taken) else None,
            "slowest": int(self._call_ranks(done)[slowest]) if len(taken) else None,
        }

    def _slots(self, entries: range) -> list[dict[str, Any]]:
        starts = self._merged.entry_start
        by_slot: dict[int, list[int]] = {}
        for entry in entries:
            by_slot.setdefault(int(self._slot[starts[entry]]), []).append(entry)
        result = []
        for variants in by_slot.values():
            described = [self._descriptions[int(self._description[starts[e]])] for e in variants]
            disagree = [
                name
                for i, name in enumerate(_SHARED_FIELDS)
                if len({d.shared[i] for d in described}) > 1
            ]
            result += [self._entry(e, d, disagree) for e, d in zip(variants, described)]
        return result

    def _entry(self, entry: int, described: Description, disagree: list[str]) -> dict[str, Any]:
        merged = self._merged
        first, last = int(merged.entry_start[entry]), int(merged.entry_start[entry + 1])
        folds = range(int(merged.entry_folds[entry]), int(merged.entry_folds[entry + 1]))
        result: dict[str, Any] = {
            "slot": self._document.vocabulary.slots.items[int(self._slot[first])],
            "ranks": self._ranks_text(self._ranks[first:last]),
            "dtype": described.dtype,
            "device": described.device,
            "shape": None if described.global_shape is None else list(described.global_shape),
            "layout": _layout(described),
        }
        if disagree:
            result["disagree"] = disagree
        result["rows"] = [first, last]
        if self._is_compact:
            result["summary"] = self._summary(first, last, len(folds))
            result["values"] = self._shapes(first, last)
        else:
            bounds = merged.fold_start
            result["values"] = [self._value(int(bounds[f]), int(bounds[f + 1])) for f in folds]
        part = slice(first, last)
        combined = self._whole.combine(
            merged.values[part], self._description[part], merged.value_stream[part],
            self._has_digest[part],
            folds=len(folds),
        )  # fmt: skip
        if combined:
            result["combined"] = [_combined(each) for each in combined]
        return result

    def _piece(self, row: int) -> dict[str, Any]:
        """What a value is besides its ranks and numbers."""
        described = self._descriptions[int(self._description[row])]
        result: dict[str, Any] = {"shape": list(described.shape)}
        if described.requires_grad:
            result["requires_grad"] = True
        flags = flag_words(int(self._merged.values["flags"][row]))
        if flags:
            result["flags"] = list(flags)
        if described.note is not None:
            result["note"] = described.note
        return result

    def _value(self, first: int, last: int) -> dict[str, Any]:
        described = self._descriptions[int(self._description[first])]
        result = {"ranks": self._ranks_text(self._ranks[first:last]), **self._piece(first)}
        if described.ranges is not None and described.shape != described.global_shape:
            result["ranges"] = [[list(r) for r in dim] for dim in described.ranges]
        if self._has_digest[first]:
            result["digest"] = _digest(self._merged.values[first])
        if self._sample_rows[first] >= 0:
            result["samples"] = {
                "dim": int(self._sample_dims[first]),
                "count": int(self._sample_counts[first]),
                "row": int(self._sample_rows[first]),
            }
        return result

    def _shapes(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return what the ranks hold, without numbers: ranks with the same shape and flags
        together."""
        piece = self._piece_of_description[self._description[first:last]]
        key = piece << 32 | (self._merged.values["flags"][first:last] & ~UNFOLDED_FLAGS).astype(
            np.int64
        )
        _, firsts, inverse = np.unique(key, return_index=True, return_inverse=True)
        return [
            {
                "ranks": self._ranks_text(self._ranks[first:last][inverse == i]),
                **self._piece(first + row),
            }
            for i, row in enumerate(firsts.tolist())
        ]

    def _summary(self, first: int, last: int, folds: int) -> dict[str, Any]:
        rows = self._merged.values[first:last][self._has_digest[first:last]]
        finite = rows[rows["count"] - rows["nan"] - rows["posinf"] - rows["neginf"] > 0]
        result: dict[str, Any] = {"distinct": folds, "digested": len(rows)}
        result |= {name: int(rows[name].sum()) for name in ("nan", "posinf", "neginf", "zero")}
        for name in ("min", "max", "mean", "std", "l2"):
            column = finite[name][~np.isnan(finite[name])]
            result[name] = (
                [number(float(column.min())), number(float(column.max()))] if len(column) else None
            )
        return result


def _layout(described: Description) -> dict[str, Any]:
    result: dict[str, Any] = {"source": described.source}
    if described.family is not None:
        result["mesh"] = described.family.name
        result["placements"] = dict(
            zip(described.family.axes, map(str, described.parsed_placements))
        )
    return result


def _digest(row: NDArray[Any]) -> dict[str, Any]:
    return {
        **{name: int(row[name]) for name in ("count", "nan", "posinf", "neginf", "zero")},
        **{name: statistic(float(row[name])) for name in ("min", "max", "mean", "std", "l2")},
        "hash": f"{int(row['hash']):016x}",
        "sketch": [number(s) for s in row["sketch"].tolist()],
    }


def _combined(combined: Combined) -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": ranks_text(combined.ranks)}
    if combined.note:
        result["note"] = combined.note
    if not combined.is_known:
        return result | {"digest": None}
    digest: dict[str, Any] = {
        n: getattr(combined, n) for n in ("count", "nan", "posinf", "neginf", "zero")
    }
    for name in ("min", "max", "mean", "std", "l2"):
        value = getattr(combined, name)
        digest[name] = None if value is None else statistic(value)
    digest["sketch"] = None if combined.sketch is None else [number(s) for s in combined.sketch]
    return result | {"digest": digest}
