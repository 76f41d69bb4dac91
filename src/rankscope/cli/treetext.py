"""The lines of `rankscope show`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.cli.terminal import Paint
from rankscope.errors import SelectionError
from rankscope.globs import glob_matches, slot_matches
from rankscope.layout.placement import Placement, PlacementKind
from rankscope.record.call import IN_ORDER, Mode
from rankscope.record.collective import collective_words
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.statistics import COUNTS, NUMBERS, STATISTICS, Combined
from rankscope.record.texts import visible
from rankscope.record.value import Digest, is_form
from rankscope.tree.crashes import crashes
from rankscope.tree.selection import nothing_matched
from rankscope.tree.slotview import SlotView, is_bound_to_one_tensor, shape_text
from rankscope.tree.summary import ended_words, endings, extent, said_by_ranks
from rankscope.tree.views import Node, Step, Trace, steps_named

COLUMNS = (*COUNTS, *NUMBERS, "hash")
_ELEMENTS = frozenset(s.name for s in STATISTICS if s.is_element)
_MAX_VALUES = 4
"""Distinct values listed below a slot whose ranks differ."""
_LONG = 24
"""Characters of an uninterpreted placement; a longer one is cut at its arguments."""
_INTEGER = re.compile(r"u?int\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of a trace to show."""

    depth: int | None
    path: str
    steps: tuple[range, ...] | None
    """None for the first step of the mode, () for all."""
    mode: Mode | None
    phases: frozenset[Phase]
    rank: int | None
    columns: tuple[str, ...] | None
    """None for those that say something of a value's dtype."""
    slots: str

    def columns_of(self, dtype: str) -> tuple[str, ...]:
        """Return the columns to show of a value."""
        if self.columns is not None:
            return self.columns
        if dtype == "bool":
            return ("count", "true")
        return ("count", "min", "max") if _INTEGER.fullmatch(dtype) else ("mean", "std")

    def takes(self, slot: str) -> bool:
        """True for slots that are asked for; forms only by their name (`form:*`)."""
        if is_form(slot) and not self.slots.startswith("form:"):
            return False
        return self.slots != "none" and slot_matches(self.slots, slot)


def parse_columns(text: str) -> tuple[str, ...] | None:
    """Return the columns that --stats names; None for those of a value's dtype. SelectionError:
    there is none of that name."""
    words = tuple(c.strip() for c in text.split(",") if c.strip() and c.strip() != "none")
    for column in words:
        if column not in COLUMNS:
            raise SelectionError(
                f"--stats: no column {column!r}; choose from {', '.join(COLUMNS)}, or none"
            )
    return words if text else None


def tree_lines(trace: Trace, view: View, paint: Paint) -> Iterator[str]:
    """Yield the lines that show a trace; SelectionError says what it has where there is no such
    step, rank or path."""
    groups = _groups(trace, view)
    if view.rank is not None and view.rank not in {rank["rank"] for rank in trace.run["ranks"]}:
        held = ranks_text(rank["rank"] for rank in trace.run["ranks"])
        raise SelectionError(f"--rank {view.rank}: the trace holds ranks {held}")
    known = {node.path for group in groups for node in group.walk()}
    if not any(glob_matches(view.path, path) for path in known):
        raise nothing_matched("--path", view.path, known)
    slots = {slot.slot for group in groups for node in group.walk() for slot in node.slots}
    if view.slots not in ("none", "*") and not any(map(view.takes, slots)):
        raise nothing_matched("--slots", view.slots, slots)
    yield from header_lines(trace, paint)
    levels = _Levels(view.path, () if view.depth is None else (*groups, *trace.steps[:1]))
    for group in groups:
        yield paint("bold", group_name(trace, group))
        yield from (f"  {visible(str(note))}" for note in group.notes)
        tree = _Tree(view, paint, levels)
        for node in group.nodes:
            yield from tree.lines(node)
        yield from tree.left_out()
    yield from complaint_lines(trace, paint)
    hidden = [step for step in trace.steps if step not in groups]
    if view.steps is None and hidden:
        yield paint("dim", f"also traced: {steps_named(hidden)}; show them with --step, --mode")


def group_name(trace: Trace, group: Step) -> str:
    """Return how a step or a setup is called, with its life where ranks had several."""
    name = group.head.words
    lives = len({rank["incarnation"] for rank in trace.run["ranks"]})
    return f"{name} (life {group.incarnation} of the ranks)" if lives > 1 else name


def complaint_lines(trace: Trace, paint: Paint) -> Iterator[str]:
    """Yield what ranks could not do as they were asked, and that belongs to no call."""
    ranks = trace.completeness["ranks"]
    for line in said_by_ranks((rank["rank"], text) for rank in ranks for text in rank["errors"]):
        yield paint("yellow", visible(line))


def _groups(trace: Trace, view: View) -> list[Step]:
    mode = view.mode if view.mode is not None else trace.default_mode
    chosen = [step for step in trace.steps if step.mode is mode]
    if view.steps is None:
        chosen = chosen[:1]
    elif view.steps:
        chosen = [step for step in chosen if any(step.step in wanted for wanted in view.steps)]
    setup = list(trace.setup) if Phase.SETUP in view.phases or not trace.steps else []
    if view.phases == {Phase.SETUP}:
        return setup
    if trace.steps and not chosen:
        asked = f"{mode.word} step {', '.join(str(r.start) for r in view.steps or ())}".rstrip()
        raise SelectionError(f"the trace holds no {asked}; it holds {steps_named(trace.steps)}")
    return [*setup, *chosen]


def header_lines(trace: Trace, paint: Paint) -> Iterator[str]:
    """Yield the job, how complete its trace is, and the first exception that ended a rank."""
    ended = not ended_words(trace.run) and endings(trace.completeness)
    is_fine = trace.is_complete and not ended and trace.steps
    how = paint("green" if is_fine else "red", trace.state)
    yield f"{paint('bold', visible(str(trace.path)))}  {visible(extent(trace.run))}, {how}"
    for first in crashes(trace)[:1]:
        yield paint("red", visible(f"first: {first} ({ranks_named([first.rank])})"))


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
        self._containers = {around for path in called for around in _around(path)} - called
        """Hold modules and are never called: a ModuleList is no level."""

    def of(self, path: str) -> int:
        if path in self._roots:
            return 0
        levels = (around for around in _around(path) if around not in self._containers)
        return sum(glob_matches(self._glob, around) for around in levels)


def _around(path: str) -> Iterator[str]:
    """Yield the paths around one, that of the root first."""
    if path and not path.startswith("@"):
        yield ""
    parts = path.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


class _Tree:
    def __init__(self, view: View, paint: Paint, levels: _Levels) -> None:
        self._view, self._paint, self._levels = view, paint, levels
        self._left_out: Counter[Phase] = Counter()

    def lines(self, top: Node) -> Iterator[str]:
        yield from self._lines(top, 1, self._levels.of(top.path))

    def left_out(self) -> Iterator[str]:
        """Yield a line that says what `--depth` has left out, if anything."""
        if self._left_out:
            counts = ", ".join(f"{n} {phase.word}" for phase, n in sorted(self._left_out.items()))
            yield self._paint("dim", f"  left out below --depth {self._view.depth}: {counts}")

    def _lines(self, node: Node, indent: int, level: int) -> Iterator[str]:
        """Yield a node and what is below it; one that is not asked for gives way to its children.
        `level` counts the shown modules around it."""
        view, paint = self._view, self._paint
        is_asked = (
            (view.rank is None or view.rank in node.ranks)
            and node.phase in (view.phases | {Phase.SETUP})
            and glob_matches(view.path, node.path)
        )
        if is_asked and view.depth is not None and level > view.depth:
            self._left_out[node.phase] += 1
        elif is_asked:
            pad = "  " * indent
            yield pad + _head(node, paint)
            yield from (pad + "    " + line for line in _outcome_lines(node, paint))
            slots = node.slots
            for slot in slots if view.slots != "none" else ():
                if view.takes(slot.slot) and (view.rank is None or view.rank in slot.ranks):
                    others = [s for s in slots if s.slot == slot.slot and s is not slot]
                    lines = _slot_lines(slot, others if slot.disagreement else (), view, paint)
                    if view.rank is None and not slot.disagreement and slot.ranks != node.ranks:
                        lines = _of_some(lines, paint("yellow", f"on {ranks_named(slot.ranks)}"))
                    yield from (pad + "    " + line for line in lines)
        is_list = node.phase.facts.is_event
        for child in node.children:
            inner = self._levels.of(child.path) if is_list else level + is_asked
            yield from self._lines(child, indent + is_asked, inner)


def _collective_text(facts: Mapping[str, Any]) -> str:
    """Return a collective in words; parts are two spaces apart: lines are broken there."""
    return "  ".join(map(visible, collective_words(facts)))


def _head(node: Node, paint: Paint) -> str:
    parts = [paint("bold", visible(node.path or "(root)"))]
    if node.class_name:
        parts.append(visible(node.class_name))
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
    if node.time.max_us:
        slowest = f", slowest rank {node.time.slowest}" if len(node.ranks) > 1 else ""
        parts.append(paint("dim", f"{_duration(node.time.max_us)}{slowest}"))
    return "  ".join(parts)


def _duration(us: float) -> str:
    if us < 1000:
        return f"{us:.0f} us"
    return f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _outcome_lines(node: Node, paint: Paint) -> Iterator[str]:
    issued = node.collectives
    for ranks, facts in issued if len(issued) > 1 else ():
        yield paint("yellow", f"{ranks_named(ranks)}  {_collective_text(facts)}")
    if not node.has_returned:
        for outcome in node.outcomes:
            if not outcome.has_returned:
                yield paint("dim" if outcome.status in IN_ORDER else "red", visible(outcome.words))
    yield from (paint("yellow", visible(error.words)) for error in node.errors)


def _of_some(lines: Iterator[str], whose: str) -> Iterator[str]:
    """Yield the lines of a slot that not all ranks of its call have; the first one says whose."""
    yield f"{next(lines)}  {whose}"
    yield from lines


def _disagreement(slot: SlotView, others: Sequence[SlotView], paint: Paint) -> str:
    """Say what ranks differ in: as a fault only where the layout says that they hold one tensor."""
    what = ", ".join(slot.disagreement)
    if is_bound_to_one_tensor(slot, others):
        return paint("red", f"{ranks_named(slot.ranks)} disagree in {what}")
    return f"{paint('dim', ranks_named(slot.ranks))}  differs by rank: {what}"


def layout_text(slot: SlotView) -> str:
    """Return the placements on the axes of the mesh, those that torch writes at length shortened:
    `_MaskPartial(...)`. "" where they are unknown."""
    return visible(" ".join(f"{axis}={_short(p)}" for axis, p in slot.placements.items()))


def _short(placement: Placement) -> str:
    text = str(placement)
    if placement.kind is PlacementKind.OTHER and len(text) > _LONG:
        return f"{text.partition('(')[0][:_LONG]}(...)"
    return text.replace("split_factor=", "")


def _slot_lines(
    slot: SlotView, others: Sequence[SlotView], view: View, paint: Paint
) -> Iterator[str]:
    """Yield what is known of a slot; `others` are the entries of ranks that differ from it."""
    if slot.dtype == "python":
        shown = (f for f in slot.folds if view.rank is None or view.rank in f.ranks)
        note, *more = [visible(fold.note or "") for fold in shown]
        differ = f"  {paint('yellow', 'ranks differ')}" if more else ""
        yield f"{visible(slot.slot)} = {note}{differ}"
        return
    folds, columns = slot.folds, view.columns_of(slot.dtype)
    parts = [f"{visible(slot.slot):<14} {slot.dtype}{shape_text(slot, view.rank)}"]
    if slot.placements:
        parts.append(paint("cyan", layout_text(slot)))
    if flags := sorted({flag for fold in folds for flag in fold.flags}):
        parts.append(paint("yellow", ",".join(flags)))
    if slot.disagreement:
        parts.append(_disagreement(slot, others, paint))
    numbers, is_one = _numbers(slot, view)
    if numbers is not None:
        parts.append(_statistics(numbers, slot.dtype, columns))
    notes = (each.note for each in slot.combined if each.note is not None)
    parts += [paint("red", str(n)) for n in notes if n.kind is NoteKind.REPLICAS_DIFFER]
    if is_one or view.rank is not None:
        yield "  ".join(filter(None, parts))
        return
    if not slot.placements:
        parts.append(paint("yellow", f"{slot.distinct} values"))
    yield "  ".join(filter(None, parts))
    wholes = slot.combined
    if wholes and all(whole.is_known for whole in wholes):  # one tensor per mesh of a kind
        for whole in wholes[:_MAX_VALUES] if columns else ():
            text = _statistics(whole, slot.dtype, columns)
            yield f"  {ranks_named(whole.ranks):<15} together  {text}"
        return
    for fold in folds[:_MAX_VALUES] if columns else ():
        if fold.digest is not None:
            numbers_text = _statistics(fold.digest, slot.dtype, columns)
            yield f"  {ranks_named(fold.ranks):<15} {list(fold.shape)}  {numbers_text}"
    if len(folds) > _MAX_VALUES and columns:
        yield paint("dim", f"  and {len(folds) - _MAX_VALUES} more")


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
