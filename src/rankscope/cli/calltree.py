"""The steps of a trace call by call, as lines: calls, and their slots with dtype, shape,
placements, what ranks differ in, numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankscope.cli.terminal import Paint
from rankscope.cli.view import View, complaint_lines, group_name, header_lines
from rankscope.globs import glob_matches
from rankscope.layout.placement import PlacementKind
from rankscope.record.call import IN_ORDER
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import collective_words, ranks_named
from rankscope.record.statistics import STATISTICS, Combined
from rankscope.record.texts import visible
from rankscope.record.value import Digest
from rankscope.tree.selection import paths_around
from rankscope.tree.slotview import SlotView, is_bound_to_one_tensor, type_text
from rankscope.tree.views import Node, Step, Trace, steps_named


def tree_lines(trace: Trace, view: View, paint: Paint) -> Iterator[str]:
    """Yield the lines that show a trace; SelectionError lists its steps, ranks or paths where the
    view matches none."""
    groups = view.matched_groups(trace)
    yield from header_lines(trace, paint)
    levels = _Levels(view.path, () if view.depth is None else (*groups, *trace.steps[:1]))
    for group in groups:
        yield paint("bold", group_name(trace, group))
        yield from (f"  {visible(str(note))}" for note in group.notes)
        yield from _CallTree(view, paint, levels).lines(group)
    yield from complaint_lines(trace, paint)
    hidden = [step for step in trace.steps if step not in groups]
    if view.steps is None and hidden:
        yield paint("dim", f"also traced: {steps_named(hidden)}; show them with --step, --mode")


class _Levels:
    """How many of the modules around a path are shown: what `--depth` counts where no call says it.

    Calls that are nested count the calls around them. Gradients and parameters stand in one list
    below their root, and what is run again stands alone.
    """

    def __init__(self, glob: str, groups: Sequence[Step]) -> None:
        self._glob = glob
        forward = [n for group in groups for n in group.walk() if n.phase is Phase.FORWARD]
        called = {node.path for node in forward}
        self._roots = {n.path for group in groups for n in group.nodes if n.phase is Phase.FORWARD}
        self._containers = {around for path in called for around in paths_around(path)} - called
        """Hold modules and are never called: a ModuleList is no level."""

    def of(self, path: str) -> int:
        if path in self._roots:
            return 0
        levels = (around for around in paths_around(path) if around not in self._containers)
        return sum(glob_matches(self._glob, around) for around in levels)


class _CallTree:
    """The calls of one step that a view takes."""

    def __init__(self, view: View, paint: Paint, levels: _Levels) -> None:
        self._view, self._paint, self._levels = view, paint, levels
        self._left_out: Counter[Phase] = Counter()

    def lines(self, group: Step) -> Iterator[str]:
        """Yield the calls of a step, and a line that says what `--depth` has left out."""
        for node in group.nodes:
            yield from self._lines(node, 1, self._levels.of(node.path))
        if self._left_out:
            counts = ", ".join(f"{n} {phase.word}" for phase, n in sorted(self._left_out.items()))
            yield self._paint("dim", f"  left out below --depth {self._view.depth}: {counts}")

    def _lines(self, node: Node, indent: int, level: int) -> Iterator[str]:
        """Yield a node and what is below it; one that is not asked for gives way to its children.
        `level` counts the shown modules around it."""
        is_asked = self._view.takes_call(node)
        if is_asked and self._view.depth is not None and level > self._view.depth:
            self._left_out[node.phase] += 1
        elif is_asked:
            pad = "  " * indent
            yield pad + _head(node, self._paint)
            yield from (f"{pad}    {line}" for line in self._about(node))
        is_list = node.phase.facts.is_event
        for child in node.children:
            inner = self._levels.of(child.path) if is_list else level + is_asked
            yield from self._lines(child, indent + is_asked, inner)

    def _about(self, node: Node) -> Iterator[str]:
        """Yield what stands below a call: collectives and ends of ranks that differ, errors,
        slots."""
        view, paint, issued = self._view, self._paint, node.collectives
        slots = node.slots if view.slots != "none" else ()
        for ranks, facts in issued if len(issued) > 1 else ():
            yield paint("yellow", f"{ranks_named(ranks)}  {_collective_text(facts)}")
        for outcome in () if node.has_returned else node.outcomes:
            if not outcome.has_returned:
                style = "dim" if outcome.status in IN_ORDER else "red"
                yield paint(style, visible(outcome.words))
        for error in node.errors:
            yield paint("yellow", visible(error.words))
        for slot in slots:
            if view.takes_slot(slot.slot) and view.has_rank(slot.ranks):
                unlike = [s for s in slots if s.slot == slot.slot and s is not slot]
                lines = slot_lines(slot, unlike if slot.disagreement else (), view, paint)
                if view.rank is None and not slot.disagreement and slot.ranks != node.ranks:
                    # not all ranks of the call have it: its first line says which do
                    yield f"{next(lines)}  {paint('yellow', f'on {ranks_named(slot.ranks)}')}"
                yield from lines


def _collective_text(facts: Mapping[str, Any]) -> str:
    """Return a collective in words; parts are two spaces apart: lines are broken there."""
    return "  ".join(map(visible, collective_words(facts)))


def _head(node: Node, paint: Paint) -> str:
    parts = [paint("bold", visible(node.path or "(root)")), visible(node.class_name)]
    if node.phase is not Phase.FORWARD:
        parts.append(paint("cyan", node.phase.word))
    if len(node.collectives) == 1:
        parts.append(_collective_text(node.collectives[0][1]))
    if node.micro_batch:
        parts.append(f"micro-batch {node.micro_batch}")
    if node.ordinal:
        parts.append(f"call {node.ordinal + 1}")
    if node.wrappers:
        parts.append(f"[{visible(', '.join(node.wrappers))}]")
    if node.is_opaque:
        parts.append(paint("dim", "opaque"))
    parts.append(paint("dim", ranks_named(node.ranks)))
    if us := node.time.max_us:
        slowest = f", slowest rank {node.time.slowest}" if len(node.ranks) > 1 else ""
        seconds = f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
        parts.append(paint("dim", f"{f'{us:.0f} us' if us < 1000 else seconds}{slowest}"))
    return "  ".join(filter(None, parts))


# ---- slots ---------------------------------------------------------------------------------------

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
