"""The tree of a trace as lines, in two ways.

* Call by call: calls, and their slots with dtype, shape, placements, what ranks differ in, numbers.
* Folded, for one screen: the outer levels of modules, a row for several that are alike, and what is
  wrong in which.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.cli.terminal import LONGEST_NAME, Paint, cut, shortened
from rankscope.cli.view import View, complaint_lines, group_name, header_lines
from rankscope.globs import glob_matches
from rankscope.layout.placement import PlacementKind
from rankscope.record.call import IN_ORDER, CallStatus
from rankscope.record.finding import Finding, Report, Severity
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, collective_words, parse_ranks, ranks_named, ranks_text
from rankscope.record.statistics import STATISTICS, Combined
from rankscope.record.texts import counted, visible
from rankscope.record.value import Digest
from rankscope.tree.alikemodules import (
    AlikeModules,
    ModuleDifference,
    ModuleOutline,
    difference,
    module_outlines,
    numbered_groups,
)
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


# ---- folded, for a screen ------------------------------------------------------------------------

_DEPTH = 2
_DEEPEST = 4
"""Of the tree where numbered layers stand deeper and there is room."""
_LONGEST_CLASS = 32
_LONGEST_LAYOUT = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreeRow:
    level: int
    name: str
    parts: tuple[str, ...]
    """Painted; two spaces apart."""
    weight: int
    """What weighs least is shown first: 0 leads to a fault."""
    count: int
    """Modules that it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowPlace:
    """Where rows stand: below which module's."""

    level: int = 0
    around: str = ""
    """Path of that module."""
    ranks: str
    """Ranks of the row above, as text: a row below names its ranks where they are others."""
    is_quiet: bool = True
    """True where that row says already what follows from a fault."""

    def name(self, group: AlikeModules) -> str:
        """Return the path of modules inside the one around them."""
        return group.path[len(self.around) + 1 :] if self.around else group.path


@dataclass(slots=True, kw_only=True)
class _Standing:
    """What is wrong in a module and in the modules inside it."""

    first: Finding | None = None
    """The first fault, if in here."""
    said: dict[str, set[int]] = field(default_factory=dict)
    """Ranks by what is wrong: other origins, warnings, calls that did not end in order."""
    is_fault: bool = False
    """True where one of these is a fault, and not a warning or a call that a rank is still in."""
    phases: dict[str, None] = field(default_factory=dict)
    """Words of the phases in which values follow from a fault."""

    def key(self) -> Hashable:
        """Return what must be equal in modules that share a row."""
        return self.first is not None, frozenset(self.said), frozenset(self.phases)


class FoldedTree:
    """The modules of one step, and a report's findings in them."""

    def __init__(
        self, trace: Trace, report: Report | None, step: Step, paint: Paint, columns: int
    ) -> None:
        self._roots, self._paint, self._columns = module_outlines(step.nodes), paint, columns
        self._longest_name = min(LONGEST_NAME, columns // 2)
        self._ranks = ranks_text(rank["rank"] for rank in trace.run["ranks"])
        states = trace.completeness["ranks"]
        self._running = {r["rank"] for r in states if r["end"] == EndReason.RUNNING.value}
        self._inside: dict[str, _Standing] = {}
        self._own: dict[str, _Standing] = {}
        self._first: Finding | None = None
        for finding in report.findings if report is not None else ():
            self._take(finding)
        for module in (module for root in self._roots for module in root.walk()):
            for (phase, fact), ends in module.facts.items():
                for status, ranks in sorted(ends) if fact == "ended" else ():
                    if status not in IN_ORDER:
                        self._take_end(module.path, phase, status, parse_ranks(ranks))
        self._keys = {path: standing.key() for path, standing in self._inside.items()}

    def _take(self, finding: Finding) -> None:
        is_warning = finding.severity is Severity.WARNING
        if is_warning or (finding.is_origin and self._first is not None):
            self._say(finding.path, finding.kind.value, finding.ranks, is_fault=not is_warning)
            return
        for standing in self._standings(finding.path):
            if self._first is None:
                standing.first = finding
            else:
                standing.phases[finding.phase.word] = None
        self._first = self._first or finding

    def _take_end(self, path: str, phase: str, status: str, ranks: Sequence[int]) -> None:
        of = "" if phase == Phase.FORWARD.word else f" in {phase}"
        is_inside = status == CallStatus.UNFINISHED.word and self._running.issuperset(ranks)
        text = "not back yet" if is_inside else status.replace("_", " ")
        self._say(path, f"{text}{of}", ranks, is_fault=not is_inside)

    def _say(self, path: str, text: str, ranks: Sequence[int], *, is_fault: bool) -> None:
        for standing in self._standings(path):
            standing.is_fault |= is_fault
            standing.said.setdefault(text, set()).update(ranks)

    def _standings(self, path: str) -> Iterator[_Standing]:
        """Yield the standing of a module itself, and of each module around it."""
        yield self._own.setdefault(path, _Standing())
        for outer in {*paths_around(path), path}:
            yield self._inside.setdefault(outer, _Standing())

    def rows(self, room: int, more: str) -> list[str]:
        """Return at most so many rows, which fit the terminal; `more` is the command that prints
        what has no room."""
        for depth in range(self._deepest(), _DEPTH - 1, -1):
            rows = [row for root in self._roots for row in self._shown(root, depth)]
            if len(rows) <= room:
                break
        order = sorted(range(len(rows)), key=lambda i: (rows[i].weight, i))
        chosen = sorted(order if len(rows) <= room else order[: max(room - 1, 0)])
        widths = (2 * rows[i].level + len(rows[i].name) for i in chosen)
        wide = min(max(widths, default=0), self._longest_name)
        lines = [self._line(rows[i], wide) for i in chosen]
        if left_out := sum(row.count for row in rows) - sum(rows[i].count for i in chosen):
            text = f"    and {counted(left_out, 'module')} more: "
            fits = len(text) + len(more) <= self._columns
            lines.append(self._paint("dim", text + (more if fits else "--depth 2 --slots none")))
        return [cut(line, self._columns) for line in lines][:room]

    def _deepest(self) -> int:
        """Return the level below the first numbered modules, which in many models stand deeper."""
        inside, level = list(self._roots), 0
        while inside and level < _DEEPEST - 1:
            inside, level = [child for module in inside for child in _called(module)], level + 1
            if any(child.number is not None for child in inside):
                return max(level + 1, _DEPTH)
        return _DEPTH

    def _line(self, row: _TreeRow, wide: int) -> str:
        pad = "  " * (row.level + 1)
        gap = " " * max(wide - 2 * row.level - len(row.name), 0)
        name = self._paint("bold", row.name)
        return "  ".join([f"{pad}{name}{gap}", *filter(None, row.parts)]).rstrip()

    def _shown(self, root: ModuleOutline, depth: int) -> Iterator[_TreeRow]:
        top, is_expanded = _RowPlace(ranks=self._ranks), any(_called(root))
        yield self._row(AlikeModules(modules=(root,)), top, is_expanded=is_expanded)
        below = _RowPlace(level=1, ranks=root.ranks or self._ranks, is_quiet=False)
        yield from self._below(root, below, depth)

    def _below(self, module: ModuleOutline, place: _RowPlace, depth: int) -> Iterator[_TreeRow]:
        """Yield the rows of the modules inside one."""
        for row in numbered_groups(list(_called(module)), self._keys):
            model = max(row, key=lambda group: (group.kinds == 1, len(group.modules)))
            expanded = next((group for group in row if group.kinds == 1), None)
            for group in row:
                is_open = group is expanded and place.level < depth
                is_expanded = is_open and any(_called(group.first))
                unlike = None
                if group is not model and group.kinds == 1:
                    unlike = difference(group.first, model.first)
                text = _told(unlike, shortened(place.name(model))) if unlike else ""
                yield self._row(group, place, is_expanded=is_expanded, unlike=text)
                if is_expanded:
                    first, is_row = group.first, len(group.modules) > 1 or len(row) > 1
                    below = _RowPlace(
                        level=place.level + 1, around=first.path, ranks=first.ranks or place.ranks,
                        is_quiet=place.is_quiet or is_row,
                    )  # fmt: skip
                    yield from self._below(first, below, depth)

    def _row(
        self, group: AlikeModules, place: _RowPlace, *, is_expanded: bool, unlike: str = ""
    ) -> _TreeRow:
        module, level = group.first, place.level
        is_numbered = len(group.modules) > 1 or module.number is not None
        standings = self._inside if not is_expanded or is_numbered else self._own
        standing = standings.get(module.path, _Standing())
        marks = list(self._marks(standing, module.path, is_quiet=place.is_quiet))
        parts = [self._kind(group)]
        if module.ranks and module.ranks != place.ranks:
            parts.append(self._paint("dim", shortened(ranks_named(module.ranks))))
        if unlike and not marks:
            parts.append(self._paint("yellow", f"differs: {unlike}"))
        elif not marks and not is_expanded and group.kinds == 1:
            parts.append(self._paint("cyan", _output(module)))
        return _TreeRow(
            level=level,
            name=shortened(place.name(group), self._longest_name) or "(root)",
            parts=(*parts, *marks),
            weight=0 if standing.first or not level else level - 2 * bool(marks or unlike) + 2,
            count=len(group.modules),
        )

    def _kind(self, group: AlikeModules) -> str:
        names = sorted({module.class_name for module in group.modules} - {""})
        name = shortened(" or ".join(names), _LONGEST_CLASS)
        if len(group.modules) == 1:
            return name
        likeness = "alike" if group.kinds == 1 else f"of {group.kinds} kinds"
        return f"{len(group.modules)} x {name or 'modules'}, {likeness}"

    def _marks(self, standing: _Standing, path: str, *, is_quiet: bool) -> Iterator[str]:
        if standing.first is not None:
            first = standing.first
            inside = first.path[len(path) + 1 if path else 0 :]
            slot = f":{first.slot}" if first.slot else ""
            place = shortened(f"{inside}{slot}".lstrip(":"))
            where = f": {place}" if place else ""
            who_text = shortened(ranks_named(first.ranks))
            yield self._paint("red", f"first fault{where}, {who_text}")
            return
        if standing.said:
            texts = [f"{text} on {ranks_named(ranks)}" for text, ranks in standing.said.items()]
            more = f" and {len(texts) - 2} more" if len(texts) > 2 else ""
            listed = "; ".join(shortened(text) for text in texts[:2])
            yield self._paint("red" if standing.is_fault else "yellow", f"{listed}{more}")
        if standing.phases and not is_quiet:
            yield self._paint("yellow", f"infected: {', '.join(standing.phases)}")


def _called(module: ModuleOutline) -> Iterator[ModuleOutline]:
    """Yield the modules that stand one level below: what only holds others gives way to them, but
    numbered modules stand for themselves."""
    for child in module.children.values():
        if child.ranks or (child.number is not None and child.children):
            yield child
        else:
            yield from _called(child)


def _output(module: ModuleOutline) -> str:
    """Return dtype, shape and placements of what a module gave, "" where ranks gave several."""
    if len(module.outputs) != 1:
        return ""
    slot = module.outputs[0]
    layout = shortened(layout_text(slot), _LONGEST_LAYOUT)
    return f"{visible(type_text(slot))} {layout}".rstrip()


def _told(unlike: ModuleDifference, model: str) -> str:
    """Return in what a module differs from the others of its row."""
    where, fact, model_fact = visible(unlike.path), unlike.value, unlike.other_value
    place = f"{where} " if where else ""
    if unlike.fact == "module":
        return f"has {where}, {model} has not" if fact else f"has no {where}, {model} has"
    if unlike.fact in ("class", "ranks") and not where:
        return ""  # the row says it
    if unlike.fact == "class":
        return f"{place}is a {visible(fact)}, in {model} a {visible(model_fact)}"
    if unlike.fact == "calls":
        count, model_count = (counted(n, "call") if n else "none" for n in (fact, model_fact))
        return f"{place}has {count} in {unlike.phase}, in {model} {model_count}"
    if unlike.fact == "ranks":
        return f"{place}is called on other ranks in {unlike.phase}"
    if unlike.fact == "collectives":
        return f"{place}{_collectives(fact, model_fact)}"
    if unlike.fact in ("ended", "wrappers", "opaque"):
        return f"{place}{unlike.fact}: {_words(fact)}, in {model} {_words(model_fact)}"
    slot = f"{where}:{visible(unlike.fact)}" if where else visible(unlike.fact)
    if fact is None or model_fact is None:
        verb = "has no" if fact is None else "has"
        return f"{verb} {slot} in {unlike.phase}, {model} {'has' if fact is None else 'has not'}"
    unlike_facts = (fact - model_fact or fact, model_fact - fact or model_fact)
    words = next(pair for pair in zip(*map(next, map(iter, unlike_facts))) if pair[0] != pair[1])
    word, model_word = (shortened(part, _LONGEST_LAYOUT) for part in words)
    return f"{slot} is {word}, in {model} {model_word}"


def _words(value: Any) -> str:
    if value is None:
        return "none"
    texts = [": ".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value]
    return shortened(", ".join(sorted(texts)))


def _collectives(counts: Any, model_counts: Any) -> str:
    count_of, model_count_of = dict(counts or ()), dict(model_counts or ())
    ops = count_of.keys() | model_count_of.keys()
    op = min(name for name in ops if count_of.get(name) != model_count_of.get(name))
    return f"issues {count_of.get(op, 0)} x {visible(op)}, others {model_count_of.get(op, 0)}"
