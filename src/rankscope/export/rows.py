"""Values as rows: what one rank holds in one slot of one call. What the ranks of a slot share is
named here; `jsonl` and `parquet` each name the numbers of a rank, and parquet's schema all columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rankscope.errors import TraceError
from rankscope.record.value import is_form
from rankscope.tree.digests import Columns, Fold
from rankscope.tree.slotview import SlotView
from rankscope.tree.views import Node, Step

__all__ = ["Row", "mode_word", "rows_of"]


class Row(NamedTuple):
    """One value on one rank."""

    shared: dict[str, Any]
    """What all ranks of the slot have in common: call, slot, dtype, layout."""
    fold: Fold
    """What this rank shares with the ranks that hold the same: local shape, flags, note."""
    rank: int
    row: int
    """Where its numbers stand in the value columns."""


def mode_word(step: Step) -> str:
    """Return train, eval, or setup for what is before the first step."""
    return "setup" if step.is_setup else step.mode.word


def rows_of(
    step: Step, nodes: Iterable[Node], columns: Columns, ranks: frozenset[int]
) -> Iterator[Row]:
    """Yield the rows of some nodes of a step, for some ranks. The forms of calls are none.

    Raises:
        TraceError: the tree and its columns do not fit.
    """
    rank_of = columns["values.rank"]
    for node in nodes:
        slots = [slot for slot in node.slots if not is_form(slot.slot)]
        call = _call(step, node) if slots else {}
        for slot in slots:
            rows, folds = slot.rows, slot.folds
            if rows.stop > len(rank_of):
                raise TraceError(
                    f"{node.path or '(root)'} {slot.slot}: rows up to {rows.stop} of "
                    f"{len(rank_of)}: the trace is damaged"
                )
            whose = {rank: fold for fold in folds for rank in fold.ranks}
            shared: dict[str, Any] = {}
            for row, rank in zip(rows, rank_of[rows.start : rows.stop].tolist()):
                if rank in ranks and rank in whose:
                    shared = shared or call | _slot(slot)
                    yield Row(shared, whose[rank], rank, row)


def _call(step: Step, node: Node) -> dict[str, Any]:
    return {
        "mode": mode_word(step),
        "step": step.step,
        "incarnation": step.incarnation,
        "micro_batch": node.micro_batch,
        "phase": node.phase.word,
        "path": node.path,
        "class": node.class_name,
        "ordinal": node.ordinal,
        "node": node.id,
    }


def _slot(slot: SlotView) -> dict[str, Any]:
    shape = slot.global_shape
    return {
        "slot": slot.slot,
        "dtype": slot.dtype,
        "device": slot.device,
        "global_shape": None if shape is None else list(shape),
        "layout": slot.source.value,
        "mesh": slot.mesh_name or None,
        "placements": {axis: str(p) for axis, p in slot.placements.items()} or None,
    }
