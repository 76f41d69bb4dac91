"""Nodes as the JSON of docs/trace-format.md, what people open: one line for each node, slot and
value, children indented. Text is made as cursors pass, so a large step takes no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.record.statistics import COUNTS, NUMBERS, Combined
from rankscope.record.stepcolumns import DIGEST
from rankscope.record.value import ValueFlag
from rankscope.tree.jsontext import encoded, number, statistic
from rankscope.tree.slotview import SlotView, flag_words
from rankscope.tree.step import StepColumns
from rankscope.tree.views import Node, Step

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
    """Write the outermost nodes of a step as a JSON list, children inside. `pad`: a line break and
    the spaces before a node."""
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
        self._entry_rows: list[int] = step.entry_start.tolist()
        first = step.entry_start[:-1]
        self._slots: list[int] = step["values.slot"][first].tolist()
        self._tensors: list[int] = step["values.tensor"][first].tolist()
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

    def list_(self, items: Sequence[T], one: Callable[[T, str], None], pad: str) -> None:
        """Add a list with a line for each item; there is one."""
        opening = "["
        for item in items:
            self._pieces.append(opening + pad)
            one(item, pad + " ")
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
        self, name: str, items: Sequence[T], one: Callable[[T, str], None], pad: str
    ) -> None:
        if items:
            self._pieces.append(f',{pad}"{name}": ')
            self.list_(items, one, pad + " ")
        else:
            self._pieces.append(f', "{name}": []')

    def _head(self, node: Node) -> Data:
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
        return found

    def _slot(self, slot: SlotView, pad: str) -> None:
        step, entry = self._step, slot.entry
        begin, end = self._entry_rows[entry : entry + 2]
        ranks, disagreement = step.ranks("values", slice(begin, end)), slot.disagreement
        key = "slot", self._slots[entry], ranks, self._tensors[entry], disagreement
        beginning = self._beginnings.get(key)
        if beginning is None:
            beginning = self._beginnings[key] = encoded(self._slot_head(slot))[:-1]
        self._pieces.append(f'{beginning}, "rows": [{begin}, {end}]')
        if self._has_tensors:
            lists = {"kept": slot.references(), "not_kept": slot.not_kept}
            for name, those in lists.items():
                if those:
                    self._pieces.append(f', "{name}": {encoded(ranks_text(those))}')
        self._member("values", range(*self._entry_folds[entry : entry + 2]), self._fold, pad)
        if combined := slot.combined:
            self._member("combined", combined, self._combined, pad)
        self._pieces.append("}")

    def _slot_head(self, slot: SlotView) -> Data:
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
        return found

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
            digest["sketch"] = None if sketch is None else [number(each) for each in sketch]
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
        if (known := self._beginnings.get(key)) is not None:
            return str(known)
        facts, flags = self._step.texts.tensor(tensor), flag_words(bits)
        found: Data = {"ranks": self._step.ranks_text(ranks), "shape": list(facts.shape)}
        if facts.requires_grad:
            found["requires_grad"] = True
        if flags:
            found["flags"] = list(flags)
        if facts.note is not None:
            found["note"] = facts.note
        if facts.ranges is not None and facts.shape != facts.global_shape:
            found["ranges"] = [[list(each) for each in dim] for dim in facts.ranges]
        text = self._beginnings[key] = encoded(found)[:-1]
        return text


def _digest_texts(step: StepColumns, rows: NDArray[Any]) -> list[str]:
    own = (step[column.name][rows] for column in DIGEST)
    return [_DIGEST % numbers for numbers in zip(*map(_number_texts, own))]


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
