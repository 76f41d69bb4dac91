"""A slot of a call in text: dtype, shape, placements, what ranks differ in, numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from rankscope.cli.terminal import Paint
from rankscope.cli.view import View
from rankscope.layout.placement import PlacementKind
from rankscope.record.notes import NoteKind
from rankscope.record.ranks import ranks_named
from rankscope.record.statistics import STATISTICS, Combined
from rankscope.record.texts import visible
from rankscope.record.value import Digest
from rankscope.tree.slotview import SlotView, is_bound_to_one_tensor, type_text

_ELEMENTS = frozenset(s.name for s in STATISTICS if s.is_element)
_MAX_VALUES = 4
"""Distinct values listed below a slot whose ranks differ."""
_LONG = 24
"""Characters of an uninterpreted placement; a longer one is cut at its arguments."""
_INTEGER = re.compile(r"u?int\d+")


def layout_text(slot: SlotView) -> str:
    """Return the placements on the axes of the mesh, those that torch writes at length shortened:
    `_MaskPartial(...)`. "" where they are unknown."""
    texts = []
    for axis, placement in slot.placements.items():
        text = str(placement)
        if placement.kind is PlacementKind.OTHER and len(text) > _LONG:
            text = f"{text.partition('(')[0][:_LONG]}(...)"
        texts.append(f"{axis}={text.replace('split_factor=', '')}")
    return visible(" ".join(texts))


def slot_lines(
    slot: SlotView, unlike: Sequence[SlotView], view: View, paint: Paint
) -> Iterator[str]:
    """Yield the lines of a slot; `unlike` are the entries of ranks that differ from it."""
    folds, columns = slot.folds, _columns(view, slot.dtype)
    if slot.dtype == "python":
        note, *more = [visible(fold.note or "") for fold in folds if view.has_rank(fold.ranks)]
        differ = f"  {paint('yellow', 'ranks differ')}" if more else ""
        yield f"{visible(slot.slot)} = {note}{differ}"
        return
    flags = ",".join(sorted({flag for fold in folds for flag in fold.flags}))
    parts = [f"{visible(slot.slot):<14} {type_text(slot, view.rank)}"]
    parts += [paint("cyan", layout_text(slot)), paint("yellow", flags)]
    if slot.disagreement:
        aspects, holders = ", ".join(slot.disagreement), ranks_named(slot.ranks)
        # a fault only where the layout says that the ranks hold one tensor
        if is_bound_to_one_tensor(slot, unlike):
            parts.append(paint("red", f"{holders} disagree in {aspects}"))
        else:
            parts.append(f"{paint('dim', holders)}  differs by rank: {aspects}")
    wholes = slot.combined
    numbers, is_one = _numbers(slot, view)
    if numbers is not None:
        parts.append(_statistics(numbers, slot.dtype, columns))
    notes = (joint.note for joint in wholes if joint.note is not None)
    parts += [paint("red", str(n)) for n in notes if n.kind is NoteKind.REPLICAS_DIFFER]
    if not is_one and not slot.placements:
        parts.append(paint("yellow", f"{slot.distinct} values"))
    yield "  ".join(filter(None, parts))
    if is_one or not columns:
        return
    rows: list[tuple[Sequence[int], str, Digest | Combined | None]]
    if wholes and all(combined.is_known for combined in wholes):  # one tensor per mesh of a kind
        rows, more_folds = [(combined.ranks, "together", combined) for combined in wholes], 0
    else:
        rows = [(fold.ranks, str([*fold.shape]), fold.digest) for fold in folds]
        more_folds = len(folds) - _MAX_VALUES
    for ranks, what, row_numbers in rows[:_MAX_VALUES]:
        if row_numbers is not None:
            text = _statistics(row_numbers, slot.dtype, columns)
            yield f"  {ranks_named(ranks):<15} {what}  {text}"
    if more_folds > 0:
        yield paint("dim", f"  and {more_folds} more")


def _columns(view: View, dtype: str) -> tuple[str, ...]:
    """Return the columns to show of a value."""
    if view.columns is not None:
        return view.columns
    if dtype == "bool":
        return ("count", "true")
    return ("count", "min", "max") if _INTEGER.fullmatch(dtype) else ("mean", "std")


def _numbers(slot: SlotView, view: View) -> tuple[Digest | Combined | None, bool]:
    """Return the numbers to print beside a slot, and whether they speak for all ranks."""
    if view.rank is not None:
        return slot.per_rank().get(view.rank), True
    if len(slot.combined) == 1 and slot.combined[0].is_known:
        return slot.combined[0], True
    if slot.distinct == 1:
        return next(iter(slot.per_rank().values()), None), True
    return None, False


def _statistics(numbers: Digest | Combined, dtype: str, columns: Sequence[str]) -> str:
    return "  ".join(f"{name} {_number(name, numbers, dtype)}" for name in columns)


def _number(name: str, numbers: Digest | Combined, dtype: str) -> str:
    if name == "true":
        if numbers.count is None or numbers.zero is None:
            return "-"
        return str(numbers.count - numbers.zero)
    if name == "hash":
        return f"{numbers.hash:016x}" if isinstance(numbers, Digest) else "-"
    value = numbers.number(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if name in _ELEMENTS and _INTEGER.fullmatch(dtype):
        return str(int(value))  # four digits do not tell one token from the next
    return str(value) if isinstance(value, int) else f"{value:.4g}"
