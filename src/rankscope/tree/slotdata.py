"""Slots and values as the JSON data of docs/trace-format.md, a range of entries at a time.

Numbers leave numpy by column, a group of nodes at once; what only a description or a set of ranks
decides is made once and shared by every value that has it.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.interning import Description, Interned, Vocabulary
from rankscope.assembly.nodes import UNFOLDED_FLAGS, Merged
from rankscope.assembly.tables import Tables
from rankscope.assembly.whole import WholeTensors
from rankscope.layout.placement import Ranges
from rankscope.layout.plan import Piece
from rankscope.record.ranklists import RankTexts, ranks_text
from rankscope.record.statistics import COUNTS, NUMBERS, finite_counts
from rankscope.record.value import ValueFlag
from rankscope.record.wholestatistics import Combined
from rankscope.tree.jsontext import number, statistic

__all__ = ["SlotData", "flag_words"]

_SHARED_FIELDS = ("dtype", "device", "global_shape", "source", "mesh", "placements")
_HIDDEN_FLAGS = (
    ValueFlag.REUSED
    | ValueFlag.HAS_SAMPLES
    | ValueFlag.SUPERSEDES
    | ValueFlag.PYTHON
    | ValueFlag.NOT_KEPT
    | ValueFlag.AS_LEFT
    | ValueFlag.SAME_LINES
)
"""They say how a value was obtained; what was not kept stands in the entry, by rank."""
Data = dict[str, Any]


@functools.lru_cache(maxsize=1024)
def flag_words(flags: int) -> tuple[str, ...]:
    """Return the words of a value's flags, without those that only say how it was obtained."""
    shown = flags & ~int(_HIDDEN_FLAGS)
    return tuple(flag.name.lower() for flag in ValueFlag if int(flag) & shown and flag.name)


class SlotData:
    """Makes the entries of nodes; in compact form the numbers stay in the columns."""

    def __init__(
        self,
        tables: Tables,
        merged: Merged,
        vocabulary: Vocabulary,
        rank_of_stream: NDArray[np.int64],
        texts: RankTexts,
        *,
        is_compact: bool,
        first_row: int = 0,
        first_sample: int = 0,
    ) -> None:
        """Make none yet; arguments as the fields of `Document`."""
        self._first_row, self._first_sample = first_row, first_sample
        order = merged.order
        self._merged, self._is_compact, self._texts = merged, is_compact, texts
        self._descriptions = vocabulary.descriptions.items
        self._whole = WholeTensors(self._descriptions, rank_of_stream)
        self._slot_names = vocabulary.slots.items
        self._ranks = rank_of_stream[merged.value_stream]
        self._description = tables.description[order]
        self._has_digest = tables.has_digest[order]
        self._samples = (tables.sample_dim, tables.sample_count, tables.sample_start)
        flags = merged.values.column("flags")
        self._is_kept = merged.values.column("reference") != 0
        self._is_missed = (flags & np.uint32(ValueFlag.NOT_KEPT)) != 0
        self._has_tensors = bool(self._is_kept.any() or self._is_missed.any())
        self._slot = tables.slot[order[merged.entry_start[:-1]]].tolist()
        self._entry_description = self._description[merged.entry_start[:-1]].tolist()
        self._shared: dict[int, Data] = {}
        self._pieces: dict[tuple[int, int], Data] = {}
        local: Interned[object] = Interned()
        self._piece_of_description = np.array(
            [
                local.number((d.piece.shape, d.note, d.requires_grad, _own_ranges(d.piece)))
                for d in self._descriptions
            ],
            np.int64,
        )

    def entries(self, first: int, last: int) -> list[Data]:
        """Return entries `first` to `last` (excluded): whole nodes' ones."""
        if first == last:
            return []
        starts = self._merged.entry_start[first : last + 1].tolist()
        folds = self._merged.entry_folds[first : last + 1].tolist()
        compact = self._compact(first, last) if self._is_compact else None
        values = [] if self._is_compact else self._values(folds[0], folds[-1])
        kept = self._kept_ranks(starts) if self._has_tensors else itertools.repeat({})
        made: list[Data] = []
        for i, ((begin, end), where) in enumerate(zip(itertools.pairwise(starts), kept)):
            described = self._entry_description[first + i]
            result: Data = {
                "slot": self._slot_names[self._slot[first + i]],
                "ranks": self._texts.text(self._ranks[begin:end]),
                **self._shared_data(described),
                "rows": [begin + self._first_row, end + self._first_row],
                **where,
            }
            if compact is not None:
                result |= compact[i]
            else:
                result["values"] = values[folds[i] - folds[0] : folds[i + 1] - folds[0]]
            count = folds[i + 1] - folds[i]
            if self._whole.is_spread(described, folds=count):
                combined = self._combine(begin, end)
                if combined:
                    result["combined"] = combined
            made.append(result)
        self._mark_disagreement(made, first)
        return made

    def _kept_ranks(self, starts: list[int]) -> list[Data]:
        """Say for each entry of which ranks the bytes are in the trace, and of which they are not
        although they were asked for."""
        first, last = starts[0], starts[-1]
        bounds = np.array(starts[:-1]) - first
        found: list[Data] = [{} for _ in bounds]
        for name, column in (("kept", self._is_kept), ("not_kept", self._is_missed)):
            has_any = np.logical_or.reduceat(column[first:last], bounds)
            for i in np.flatnonzero(has_any).tolist():
                entry = slice(starts[i], starts[i + 1])
                found[i][name] = self._texts.text(self._ranks[entry][column[entry]])
        return found

    def _mark_disagreement(self, made: list[Data], first: int) -> None:
        """Say in what the entries of one slot of one node differ; they stand side by side."""
        nodes = self._merged.value_node[self._merged.entry_start[first : first + len(made)]]
        slots = np.array(self._slot[first : first + len(made)])
        joined = np.flatnonzero((nodes[1:] == nodes[:-1]) & (slots[1:] == slots[:-1])) + 1
        for run in np.split(joined, np.flatnonzero(np.diff(joined) != 1) + 1):
            if not len(run):
                continue
            variants = range(int(run[0]) - 1, int(run[-1]) + 1)
            shared = [self._described(self._entry_description[first + v]).shared for v in variants]
            differ = [n for i, n in enumerate(_SHARED_FIELDS) if len({s[i] for s in shared}) > 1]
            for variant in variants:
                rows_on = {n: made[variant].pop(n) for n in [*made[variant]] if n in _BEHIND}
                made[variant] |= {"disagree": differ, **rows_on}

    def _described(self, number: int) -> Description:
        return self._descriptions[number]

    def _shared_data(self, number: int) -> Data:
        """What all ranks of an entry agree on."""
        found = self._shared.get(number)
        if found is None:
            described = self._described(number)
            whole = described.piece.global_shape
            found = self._shared[number] = {
                "dtype": described.dtype,
                "device": described.device,
                "shape": None if whole is None else list(whole),
                "layout": _layout(described),
            }
        return found

    def _piece(self, number: int, flags: int) -> Data:
        """What a value is besides its ranks and numbers."""
        found = self._pieces.get((number, flags))
        if found is not None:
            return found
        described = self._described(number)
        piece = described.piece
        result: Data = {"shape": list(piece.shape)}
        if described.requires_grad:
            result["requires_grad"] = True
        words = flag_words(flags)
        if words:
            result["flags"] = list(words)
        if described.note is not None:
            result["note"] = described.note
        is_part = piece.ranges is not None and piece.shape != piece.global_shape
        if is_part and (not self._is_compact or _own_ranges(piece)):
            result["ranges"] = [[list(r) for r in dim] for dim in piece.ranges or ()]
        self._pieces[number, flags] = result
        return result

    def _values(self, first: int, last: int) -> list[Data]:
        """Return the values of folds `first` to `last` (excluded), each with its numbers."""
        bounds = self._merged.fold_start[first : last + 1]
        heads = bounds[:-1]
        rows = self._merged.values.rows(heads)
        has_digest = self._has_digest[heads]
        digests = _digests(rows) if has_digest.any() else itertools.repeat({})
        sampled = self._merged.order[heads]
        samples = zip(*(column[sampled].tolist() for column in self._samples))
        made: list[Data] = []
        for begin, end, described, flags, is_digested, digest, (dim, count, row) in zip(
            heads.tolist(), bounds[1:].tolist(), self._description[heads].tolist(),
            rows["flags"].tolist(), has_digest.tolist(), digests, samples,
        ):  # fmt: skip
            value = {
                "ranks": self._texts.text(self._ranks[begin:end]),
                **self._piece(described, flags),
            }
            if is_digested:
                value["digest"] = digest
            if row >= 0:
                value["samples"] = {"dim": dim, "count": count, "row": row + self._first_sample}
            made.append(value)
        return made

    def _combine(self, begin: int, end: int) -> list[Data]:
        part = slice(begin, end)
        merged = self._merged
        found = self._whole.combine(
            merged.values.rows(part), self._description[part], merged.value_stream[part],
            self._has_digest[part],
        )  # fmt: skip
        return [_combined(each) for each in found]

    def _compact(self, first: int, last: int) -> list[Data]:
        """Return for each entry what all its ranks' numbers come to, and what the ranks hold."""
        bounds = self._merged.entry_start[first : last + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        starts = bounds[:-1] - begin
        rows, has_digest = self._merged.values.rows(slice(begin, end)), self._has_digest[begin:end]
        flags = (rows["flags"] & ~UNFOLDED_FLAGS).astype(np.int64)
        key = self._piece_of_description[self._description[begin:end]] << 32 | flags
        is_one = np.minimum.reduceat(key, starts) == np.maximum.reduceat(key, starts)
        distinct = np.diff(self._merged.entry_folds[first : last + 1])
        made = []
        for i, summary in enumerate(_summaries(rows, has_digest, starts, distinct)):
            at, stop = int(bounds[i]), int(bounds[i + 1])
            own = key[at - begin : stop - begin]
            parts = [np.arange(stop - at)]
            if not is_one[i]:
                parts = [np.flatnonzero(own == each) for each in np.unique(own)]
            values = [
                {
                    "ranks": self._texts.text(self._ranks[at + part]),
                    **self._piece(
                        int(self._description[at + part[0]]),
                        int(rows["flags"][at - begin + part[0]]),
                    ),
                }
                for part in parts
            ]
            made.append({"summary": summary, "values": values})
        return made


_BEHIND = frozenset({"rows", "kept", "not_kept", "summary", "values", "combined"})
"""What stands behind `disagree` in an entry."""


def _digests(rows: NDArray[Any]) -> list[Data]:
    """Return the numbers of each row."""
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
    return [dict(zip(names, row)) for row in zip(*columns)]


def _summaries(
    rows: NDArray[Any],
    has_digest: NDArray[np.bool_],
    starts: NDArray[np.int64],
    distinct: NDArray[np.int64],
) -> list[Data]:
    """Return over the rows from each start to the next: how many, sums of counts, least and
    greatest."""
    digested = np.add.reduceat(has_digest.astype(np.int64), starts)
    made: list[Data] = [
        {"distinct": d, "digested": n} for d, n in zip(distinct.tolist(), digested.tolist())
    ]
    for name in COUNTS[1:]:
        total = np.add.reduceat(np.where(has_digest, rows[name], 0), starts)
        for summary, value in zip(made, total.tolist()):
            summary[name] = value
    finite = finite_counts(rows)
    for name in NUMBERS:
        is_known = has_digest & (finite > 0) & ~np.isnan(rows[name])
        least = np.minimum.reduceat(np.where(is_known, rows[name], np.inf), starts)
        greatest = np.maximum.reduceat(np.where(is_known, rows[name], -np.inf), starts)
        has_any = np.logical_or.reduceat(is_known, starts)
        for summary, known, low, high in zip(
            made, has_any.tolist(), least.tolist(), greatest.tolist()
        ):
            summary[name] = [number(low), number(high)] if known else None
    return made


def _own_ranges(piece: Piece) -> tuple[Ranges, ...] | None:
    """Return the ranges that do not follow from the placements: of what was cut by hand."""
    return piece.ranges if piece.layout.source.is_from_all_ranks else None


def _layout(described: Description) -> Data:
    layout = described.piece.layout
    result: Data = {"source": layout.source.value}
    if described.family is not None:
        result["mesh"] = described.family.name
        result["placements"] = layout.by_axis()
    return result


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
