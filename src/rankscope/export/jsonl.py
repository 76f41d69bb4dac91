"""`--format jsonl`: one JSON object a line, a value on a rank, every line with the same keys.

`ExportedStep` has the values and calls of a step as a table, for `parquet` too: what a call and a
tensor are is told once for each, and rows name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import SelectionError
from rankscope.export.formats import ExportPlace, Selection
from rankscope.layout.placement import LayoutSource
from rankscope.record.call import CallStatus
from rankscope.record.stepcolumns import Column, Told, exported_columns
from rankscope.record.value import TensorFacts, is_form
from rankscope.run.filenames import Progress
from rankscope.tree.jsontext import number
from rankscope.tree.slotview import flag_words
from rankscope.tree.views import Node, Step, Trace

Array = NDArray[Any]
_SOURCES = frozenset(source.value for source in LayoutSource)


class Cells(NamedTuple):
    """A column of a table."""

    items: Any
    """What stands in it: an array with an item for each row, or a list."""
    place: Array | None = None
    """Of a list: which item is a row's."""
    is_known: Array | None = None
    """Of an array: False in rows that have null; None where no row has."""

    def listed(self) -> list[Any]:
        """Return the rows as Python objects."""
        if self.place is not None:
            return [self.items[place] for place in self.place.tolist()]
        rows: list[Any] = self.items.tolist()
        if self.is_known is not None:
            for row in np.flatnonzero(~self.is_known).tolist():
                rows[row] = None
        return rows


def mode_word(step: Step) -> str:
    """Return train, eval, or setup for what is before the first step."""
    return "setup" if step.is_setup else step.mode.word


class ExportedStep:
    """One step, or some nodes of it on some ranks."""

    def __init__(self, step: Step, nodes: Iterable[Node] | None, ranks: frozenset[int]) -> None:
        """Choose nodes of a step, None for all, and the ranks whose calls and values count."""
        chosen = None if nodes is None else [*nodes]
        self.columns = chosen[0].step if chosen else step.columns()
        count = len(self.columns["nodes.id"])
        rows = range(count) if chosen is None else [node.row for node in chosen]
        self._nodes = np.array(rows, np.int64)
        self._step = step
        self._ranks = np.array(sorted(ranks), np.int64)

    def calls(self) -> Array:
        """Return the rows of the calls, in the order of the tree."""
        return self._chosen("calls")

    def values(self) -> Array:
        """Return the rows of the values, in the order of the tree: the forms of calls are none."""
        rows = self._chosen("values")
        slots, place = np.unique(self.columns["values.slot"][rows], return_inverse=True)
        is_value = [not is_form(self._text(number)) for number in slots.tolist()]
        return rows[np.array(is_value, np.bool_)[place]]

    def in_order(self, table: str, rows: Array) -> Array:
        """Return rows by path, phase, of values slot, micro-batch, ordinal, rank."""
        columns = self.columns
        node = columns[f"{table}.node"][rows]
        texts = [columns[f"nodes.{name}"][node] for name in ("path", "phase")]
        if table == "values":
            texts.append(columns["values.slot"][rows])
        # numbers of texts are in order of first sight, which differs between traces
        turns = (columns[f"nodes.{name}"][node] for name in ("micro_batch", "ordinal", "id"))
        keys = [*map(self._alphabetic, texts), *turns, columns[f"{table}.rank"][rows]]
        return rows[np.lexsort(keys[::-1])]

    def call_cells(self, rows: Array) -> dict[str, Cells]:
        """Return the columns of calls."""
        codes = self.columns["calls.status"][rows]
        status = self._once(codes, lambda code: {"status": CallStatus.word_of(code)})
        return {**self.shared_cells("calls", rows), **self._told("calls", rows), **status}

    def value_cells(self, rows: Array) -> dict[str, Cells]:
        """Return the columns of values."""
        columns = self.columns
        tensors = self._once(columns["values.tensor"][rows], self._tensor)
        bits = columns["values.flags"][rows]
        flags = self._once(bits, lambda flag_bits: {"flags": [*flag_words(flag_bits)]})
        shared, told_cells = self.shared_cells("values", rows), self._told("values", rows)
        return {**shared, **tensors, **flags, **told_cells}

    def shared_cells(self, table: str, rows: Array) -> dict[str, Cells]:
        """Return which call a row is of, of values which slot, and the rank."""
        columns = self.columns
        cells = self._once(columns[f"{table}.node"][rows], self._call)
        if table == "values":
            slots = columns["values.slot"][rows]
            cells |= self._once(slots, lambda number: {"slot": self._text(number)})
        return cells | {"rank": Cells(columns[f"{table}.rank"][rows])}

    def _chosen(self, table: str) -> Array:
        node, ranks = self.columns[f"{table}.node"], self.columns[f"{table}.rank"]
        bounds = np.searchsorted(node, [self._nodes, self._nodes + 1]).T.tolist()
        rows = np.concatenate([np.empty(0, np.int64), *(np.arange(*bound) for bound in bounds)])
        return rows[np.isin(ranks[rows], self._ranks)]

    def _once(self, column: Array, fields: Callable[[int], dict[str, Any]]) -> dict[str, Cells]:
        """Return the fields of each number in a column, made once."""
        numbers, place = np.unique(column, return_inverse=True)
        records = [fields(number) for number in numbers.tolist()]
        return {name: Cells([record[name] for record in records], place) for name in records[0]}

    def _call(self, row: int) -> dict[str, Any]:
        step, columns, lists = self._step, self.columns, self.columns.lists
        micro_batch = lists.micro_batch[row]
        return {
            "mode": mode_word(step),
            "step": step.step,
            "incarnation": step.incarnation,
            "micro_batch": None if micro_batch < 0 else micro_batch,
            "phase": self._text(lists.phase[row]),
            "path": self._text(lists.path[row]),
            "class": columns.texts.module(lists.module[row]).class_name,
            "ordinal": lists.ordinal[row],
            "node": f"{int(columns['nodes.id'][row]):016x}",
        }

    def _tensor(self, number: int) -> dict[str, Any]:
        facts: TensorFacts = self.columns.texts.tensor(number)
        has_layout = facts.source in _SOURCES  # a newer rankscope may have one more
        placements = dict(facts.placements) if has_layout else {}
        return {
            "dtype": facts.dtype,
            "device": facts.device,
            "shape": [*facts.shape],
            "global_shape": None if facts.global_shape is None else [*facts.global_shape],
            "layout": facts.source if has_layout else LayoutSource.UNKNOWN.value,
            "mesh": (has_layout and facts.mesh) or None,
            "placement": ",".join(f"{axis}={text}" for axis, text in placements.items()) or None,
            "placements": placements or None,
            "requires_grad": facts.requires_grad,
            "note": facts.note,
        }

    def _told(self, table: str, rows: Array) -> dict[str, Cells]:
        is_digested = self.columns["values.digested"][rows] if table == "values" else None
        return {
            column.own_name: _cells(column, self.columns[column.name][rows], is_digested)
            for column in exported_columns(table)
        }

    def _text(self, number: int) -> str:
        return self.columns.texts.text(number)

    def _alphabetic(self, numbers: Array) -> Array:
        """Return numbers of texts as numbers that sort as the texts do."""
        used, place = np.unique(numbers, return_inverse=True)
        words = [self._text(number) for number in used.tolist()]
        order = {word: turn for turn, word in enumerate(sorted({*words}))}
        turns: Array = np.array([order[word] for word in words], np.int64)[place]
        return turns


def _cells(column: Column, numbers: Array, is_digested: Array | None) -> Cells:
    is_known = np.ones(len(numbers), np.bool_)
    if column.told is Told.DIGEST and is_digested is not None:
        is_known &= is_digested
    if column.none is not None:
        is_known &= numbers != column.none
    if numbers.dtype.kind == "f" and numbers.ndim == 1:
        is_known &= ~np.isnan(numbers)
    if not column.is_hex:
        return Cells(numbers, None, None if is_known.all() else is_known)
    digits = numbers.astype(">u8").tobytes().hex()
    texts = [digits[16 * row : 16 * row + 16] if k else None for row, k in enumerate(is_known)]
    return Cells(texts, np.arange(len(numbers)))


_TOGETHER = 4096
"""Lines that are made at a time."""


def write(
    trace: Trace, selection: Selection, place: ExportPlace, progress: Progress
) -> Sequence[str]:
    """Write the lines, one step in memory at a time."""
    ranks = selection.ranks(trace)
    lines = 0
    encode = json.JSONEncoder(check_circular=False, allow_nan=False).encode
    with place.target.open("w", encoding="ascii") as file:
        for step, nodes in selection.walk(trace, progress, "writing values"):
            exported = ExportedStep(step, nodes, ranks)
            rows = exported.values()
            for begin in range(0, len(rows), _TOGETHER):
                cells = exported.value_cells(rows[begin : begin + _TOGETHER])
                columns = (_finite(column) for column in cells.values())
                file.writelines(encode(dict(zip(cells, line))) + "\n" for line in zip(*columns))
            lines += len(rows)
    if not lines:
        raise SelectionError("the trace holds no value in what is asked for")
    return (f"{lines} values, one a line",)


def _finite(cells: Cells) -> list[object]:
    """Return rows with NaN and infinities as JSON holds them."""
    listed, items = cells.listed(), cells.items
    if cells.place is None and items.dtype.kind == "f":
        for row in np.flatnonzero(~np.isfinite(items.reshape(len(items), -1)).all(axis=1)).tolist():
            if items.ndim == 1:
                listed[row] = None if listed[row] is None else number(listed[row])
            else:
                listed[row] = listed[row] and [number(element) for element in listed[row]]
    return listed
