"""Values as rows: what one rank holds in one slot of one call. What the ranks of a slot share is
named here; `jsonl` and `parquet` each name the numbers of a rank, and parquet's schema all columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.record.value import is_form
from rankscope.tree.slotview import Fold, SlotView
from rankscope.tree.views import Node, Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Row", "SlotRows", "call_fields", "mode_word", "rows_of", "slot_rows", "value_slots"]


class Row(NamedTuple):
    """One value on one rank."""

    shared: dict[str, Any]
    """What all ranks of the slot have in common: call, slot, dtype, layout."""
    fold: Fold
    """What this rank shares with the ranks that hold the same: local shape, flags, note."""
    rank: int
    row: int
    """Where its numbers stand in the values of its step."""


class SlotRows(NamedTuple):
    """The values of one slot entry on some ranks, as arrays of equal length."""

    shared: dict[str, Any]
    """As in `Row`."""
    folds: tuple[Fold, ...]
    fold: NDArray[np.int64]
    """Which of `folds` is a rank's."""
    rank: NDArray[np.int64]
    row: NDArray[np.int64]
    """As in `Row`."""


def mode_word(step: Step) -> str:
    """Return train, eval, or setup for what is before the first step."""
    return "setup" if step.is_setup else step.mode.word


def value_slots(node: Node) -> list[SlotView]:
    """Return the slot entries of a node that hold values: the forms of calls are none."""
    return [slot for slot in node.slots if not is_form(slot.slot)]


def rows_of(step: Step, node: Node, ranks: frozenset[int]) -> Iterator[Row]:
    """Yield the rows of a node of a step, for some ranks."""
    call: dict[str, Any] = {}
    for slot in value_slots(node):
        call = call or call_fields(step, node)
        held = slot_rows(call, slot, ranks)
        for fold, rank, row in zip(held.fold.tolist(), held.rank.tolist(), held.row.tolist()):
            yield Row(held.shared, held.folds[fold], rank, row)


def slot_rows(call: dict[str, Any], slot: SlotView, ranks: frozenset[int]) -> SlotRows:
    """Return the values of one slot entry on some ranks.

    Args:
        call: `call_fields` of its node.
        slot: the entry.
        ranks: those that are wanted.
    """
    folds = slot.pieces
    whose = {rank: place for place, fold in enumerate(folds) for rank in fold.ranks}
    found = [
        (whose[rank], rank, row)
        for row, rank in enumerate(slot.ranks, slot.rows.start)
        if rank in ranks
    ]
    table = np.array(found, np.int64).reshape(-1, 3)
    shared = call | _slot_fields(slot) if found else {}
    return SlotRows(shared, folds, table[:, 0], table[:, 1], table[:, 2])


def call_fields(step: Step, node: Node) -> dict[str, Any]:
    """Return what all values of a call have in common, by name."""
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


def _slot_fields(slot: SlotView) -> dict[str, Any]:
    shape = slot.global_shape
    placements = {axis: str(p) for axis, p in slot.placements.items()} or None
    return {
        "slot": slot.slot,
        "dtype": slot.dtype,
        "device": slot.device,
        "global_shape": None if shape is None else list(shape),
        "layout": slot.source.value,
        "mesh": slot.mesh_name or None,
        "placements": placements,
        "placement": placements and ",".join(f"{axis}={p}" for axis, p in placements.items()),
    }
