"""A trace as JSON that a person can read with `less`: a line for each node, slot and value.

Nodes, slots and values are written as cursors pass, so a large step takes no memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.record.statistics import COUNTS, NUMBERS, Combined
from rankscope.record.stepcolumns import DIGEST
from rankscope.record.value import ValueFlag
from rankscope.run.folders import TREE_FORMAT, Progress
from rankscope.tree.slotview import SlotView, flag_words
from rankscope.tree.step import StepColumns
from rankscope.tree.stepfile import entry_of
from rankscope.tree.views import Node, Step, Trace

_BROKEN = frozenset({"groups", "hosts", "meshes", "setup", "steps"})
"""Keys whose lists get one line per item, wherever they stand."""
_SECTIONS = frozenset({"completeness", "run"})
"""Objects that get one line per member."""
_MAYBE_BROKEN = _BROKEN | _SECTIONS | {"ranks"}


def statistic(value: float) -> float | str | None:
    """Return a statistic as JSON holds it: null where undefined (NaN), infinities as strings."""
    return None if math.isnan(value) else number(value)


def number(value: float) -> float | str:
    """Return a float as JSON holds it: NaN and infinities as strings."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode
"""Returns data as JSON on one line."""


def json_text(document: Mapping[str, Any]) -> list[str]:
    """Return a document as pieces of text to be joined; lists under broken keys hold objects."""
    pieces: list[str] = []
    _write_object(document, "\n ", pieces, by_member=True)
    pieces.append("\n")
    return pieces


def _write_object(
    value: Mapping[str, Any], pad: str, pieces: list[str], *, by_member: bool = False
) -> None:
    """Append an object, runs of plain members at once: encoders are fast, calling them is not."""
    line: dict[str, Any] = {}
    opening = "{"
    for key, item in value.items():
        is_broken = key in _MAYBE_BROKEN and _is_broken(key, item)
        if not is_broken and not by_member:
            line[key] = item
            continue
        if line:
            pieces.append(opening + encoded(line)[1:-1])
            line, opening = {}, ","
        pieces.append(f"{opening}{pad}{encoded(key)}: ")
        opening = ","
        if not is_broken:
            pieces.append(encoded(item))
        elif isinstance(item, dict):
            _write_object(item, pad + " ", pieces, by_member=True)
        else:
            _write_list(item, pad + " ", pieces)
    if line:
        pieces.append(("{" if opening == "{" else ", ") + encoded(line)[1:-1])
        opening = ","
    pieces.append("{}" if opening == "{" else "}")


def _write_list(items: Sequence[Mapping[str, Any]], pad: str, pieces: list[str]) -> None:
    opening = "["
    for item in items:
        pieces.append(opening + pad)
        _write_object(item, pad + " ", pieces)
        opening = ","
    pieces.append("]")


def _is_broken(key: str, item: object) -> bool:
    if key in _SECTIONS:
        return isinstance(item, dict)
    return isinstance(item, (list, tuple)) and bool(item) and isinstance(item[0], dict)


Data = dict[str, Any]
Write = Callable[[str], object]
T = TypeVar("T")
_BLOCK: Final = 2048
"""Folds whose numbers leave numpy together."""
_PIECES: Final = 4096
"""Of text that are handed on together."""
_DIGEST: Final = ", ".join(
    f'"{column.own_name}": '
    + ('"%016x"' if column.is_hex else "%s" if column.width == 1 else "[%s]")
    for column in DIGEST
)


def write_nodes(step: Step, pad: str, write: Write) -> None:
    """Write the nodes of a step as a JSON list; `pad`: line break and spaces before a node."""
    nodes = step.fresh()
    if not nodes:
        write("[]")
        return
    text = _NodesText(nodes[0].step, write)
    text.list_(nodes, text.node, pad)
    text.close()


class _NodesText:
    def __init__(self, step: StepColumns, write: Write) -> None:
        self._step, self._write = step, write
        self._pieces: list[str] = []
        self._ids: list[int] = step["nodes.id"].tolist()
        self._entry_folds: list[int] = step.entry_folds.tolist()
        self._folds: list[str] = []
        """Of one block: from `_first` on."""
        self._first = 0
        self._beginnings = step.texts.made
        flags = step["values.flags"]
        is_lost = (flags & int(ValueFlag.NOT_KEPT)) != 0
        self._has_tensors = bool(step["values.reference"].any() or is_lost.any())

    def close(self) -> None:
        """Hand on what is left."""
        self._write("".join(self._pieces))
        self._pieces.clear()

    def list_(self, items: Sequence[T], write_item: Callable[[T, str], None], pad: str) -> None:
        """Add a list with a line for each item; there is one."""
        opening = "["
        for item in items:
            self._pieces.append(opening + pad)
            write_item(item, pad + " ")
            opening = ","
        self._pieces.append("]")

    def node(self, node: Node, pad: str) -> None:
        pieces = self._pieces
        if len(pieces) > _PIECES:
            self.close()
        pieces.append(encoded(self._head(node))[:-1])
        self._member("slots", node.slots, self._slot, pad)
        self._member("children", node.children, self.node, pad)
        pieces.append("}")

    def _member(
        self, name: str, items: Sequence[T], write_item: Callable[[T, str], None], pad: str
    ) -> None:
        if items:
            self._pieces.append(f',{pad}"{name}": ')
            self.list_(items, write_item, pad + " ")
        else:
            self._pieces.append(f', "{name}": []')

    def _head(self, node: Node) -> Data:
        step, row = self._step, node.row
        lists, texts = step.lists, step.texts
        path, name = texts.text(lists.path[row]), texts.module(lists.module[row])
        fields: Data = {"id": f"{self._ids[row]:016x}", "path": path}
        if name.raw_path != path:
            fields["raw_path"] = name.raw_path
        fields["class"] = name.class_name
        if not step.is_one_module[row] and node.classes:
            fields["classes"] = [
                {"ranks": ranks_text(ranks), "class": name} for ranks, name in node.classes
            ]
        if name.wrappers:
            fields["wrappers"] = list(name.wrappers)
        if node.is_opaque:
            fields["opaque"] = True
        phase, micro_batch = texts.text(lists.phase[row]), lists.micro_batch[row]
        fields |= {
            "phase": phase,
            "micro_batch": None if micro_batch < 0 else micro_batch,
            "ordinal": lists.ordinal[row],
        }
        is_backward = phase == Phase.BACKWARD.word
        if is_backward and (node.graph_task or node.ordinal != node.of_ordinal):
            fields |= {"of_ordinal": node.of_ordinal, "graph_task": node.graph_task}
        issued = node.collectives if phase == Phase.COLLECTIVE.word else ()
        if len(issued) == 1:
            fields["collective"] = dict(issued[0][1])
        elif issued:
            fields["collectives"] = [{"ranks": ranks, **outcome} for ranks, outcome in issued]
        fields |= {"ranks": node.ranks_text, "status": node.status}
        if not lists.has_returned[row]:
            fields["outcomes"] = [
                {"ranks": ranks_text(outcome.ranks), "status": outcome.status}
                | ({"error": outcome.error} if outcome.error else {})
                for outcome in node.outcomes
            ]
        if row in step.failures:
            fields["errors"] = [
                {"ranks": ranks_text(outcome.ranks), "error": outcome.error}
                for outcome in node.errors
            ]
        fields["time"] = node.time._asdict()
        return fields

    def _slot(self, slot: SlotView, pad: str) -> None:
        step, entry = self._step, slot.entry
        lists = step.lists
        begin, end = lists.first_value[entry : entry + 2]
        ranks, disagreement = step.ranks("values", slice(begin, end)), slot.disagreement
        key = "slot", lists.slot[entry], ranks, lists.tensor[entry], disagreement
        beginning = self._beginnings.get(key)
        if beginning is None:
            beginning = self._beginnings[key] = encoded(self._slot_head(slot))[:-1]
        self._pieces.append(f'{beginning}, "rows": [{begin}, {end}]')
        if self._has_tensors:
            for name, holders in (("kept", [*slot.references()]), ("not_kept", slot.not_kept)):
                if holders:
                    self._pieces.append(f', "{name}": {encoded(ranks_text(holders))}')
        self._member("values", range(*self._entry_folds[entry : entry + 2]), self._fold, pad)
        if combined := slot.combined:
            self._member("combined", combined, self._combined, pad)
        self._pieces.append("}")

    def _slot_head(self, slot: SlotView) -> Data:
        facts = slot.facts
        layout: Data = {"source": facts.source}
        if facts.mesh:
            layout |= {"mesh": facts.mesh, "placements": dict(facts.placements)}
        fields: Data = {
            "slot": slot.slot,
            "ranks": ranks_text(slot.ranks),
            "dtype": facts.dtype,
            "device": facts.device,
            "shape": None if facts.global_shape is None else list(facts.global_shape),
            "layout": layout,
        }
        if slot.disagreement:
            fields["disagree"] = list(slot.disagreement)
        return fields

    def _fold(self, fold: int, pad: str) -> None:
        if not self._first <= fold < self._first + len(self._folds):
            self._first, self._folds = fold, self._fold_texts(fold)
        self._pieces.append(self._folds[fold - self._first])

    def _combined(self, combined: Combined, pad: str) -> None:
        result: Data = {"ranks": ranks_text(combined.ranks)}
        if combined.note is not None:
            result |= combined.note.as_json()
        digest: Data | None = None
        if combined.is_known:
            digest = {name: combined.number(name) for name in COUNTS}
            for name in NUMBERS:
                value = combined.number(name)
                digest[name] = None if value is None else statistic(value)
            sketch = combined.sketch
            digest["sketch"] = None if sketch is None else [number(n) for n in sketch]
        self._pieces.append(encoded(result | {"digest": digest}))

    def _fold_texts(self, first: int) -> list[str]:
        """Return the text of some folds; numbers leave numpy by column, for all at once."""
        step = self._step
        bounds = step.fold_start[first : first + _BLOCK + 1]
        heads = bounds[:-1]
        digests = _digest_texts(step, heads)
        is_digested = step["values.digested"][heads].tolist()
        names = ("tensor", "flags", "sample_dim", "sample_count", "sample_row")
        numbers = zip(*(step[f"values.{name}"][heads].tolist() for name in names))
        ends = zip(heads.tolist(), bounds[1:].tolist())
        texts = []
        for rows, (tensor, bits, dim, count, row), digest, is_known in zip(
            ends, numbers, digests, is_digested
        ):
            text = self._fold_beginning(step.ranks("values", slice(*rows)), tensor, bits)
            if is_known:
                text += f', "digest": {{{digest}}}'
            if row >= 0:
                text += f', "samples": {{"dim": {dim}, "count": {count}, "row": {row}}}'
            texts.append(text + "}")
        return texts

    def _fold_beginning(self, ranks: tuple[int, ...], tensor: int, bits: int) -> str:
        key = "fold", ranks, tensor, bits
        if (beginning := self._beginnings.get(key)) is not None:
            return str(beginning)
        facts, flags = self._step.texts.tensor(tensor), flag_words(bits)
        fields: Data = {"ranks": ranks_text(ranks), "shape": list(facts.shape)}
        if facts.requires_grad:
            fields["requires_grad"] = True
        if flags:
            fields["flags"] = list(flags)
        if facts.note is not None:
            fields["note"] = facts.note
        if facts.ranges is not None and facts.shape != facts.global_shape:
            fields["ranges"] = [[list(bounds) for bounds in dim] for dim in facts.ranges]
        text = self._beginnings[key] = encoded(fields)[:-1]
        return text


def _digest_texts(step: StepColumns, rows: NDArray[Any]) -> list[str]:
    columns = (step[column.name][rows] for column in DIGEST)
    return [_DIGEST % numbers for numbers in zip(*map(_number_texts, columns))]


def _number_texts(column: NDArray[Any]) -> list[Any]:
    """Return numbers as JSON has them; of a statistic NaN is null."""
    if column.dtype.kind != "f":
        return [*column.tolist()]
    odd = statistic if column.ndim == 1 else number
    texts = [*map(float.__repr__, column.reshape(-1).tolist())]
    for place in np.flatnonzero(~np.isfinite(column)).tolist():
        texts[place] = encoded(odd(float(column.flat[place])))
    if column.ndim == 1:
        return texts
    return [", ".join(row) for row in zip(*[iter(texts)] * column.shape[1])]


def write_tree(trace: Trace, steps: Sequence[Step], say: Progress, write: Write) -> None:
    """Write a tree.json: header, completeness, and every node of some steps of a trace."""
    head = {"format": TREE_FORMAT, "run": trace.run, "completeness": trace.completeness}
    write("".join(json_text(head)).rstrip().removesuffix("}").rstrip())
    done = 0
    for name in ("setup", "steps"):
        write(f',\n "{name}": [')
        chosen = [step for step in steps if step.is_setup == (name == "setup")]
        for place, step in enumerate(chosen):
            entry = encoded(entry_of(step.head)).removesuffix("}")
            write(f'{"," if place else ""}\n  {entry},\n   "nodes": ')
            write_nodes(step, "\n    ", write)
            write("}")
            done += 1
            say("writing the tree", done / len(steps))
        write("]")
    write("}\n")
