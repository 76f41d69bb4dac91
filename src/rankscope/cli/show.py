"""`rankscope show`: a trace on one screen of at most `ROWS` rows (the job, the verdict, where ranks
differ, the tree to depth 2 with alike layers folded, which commands show more), or its tree call by
call."""

from __future__ import annotations

import glob
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import TraceArgument, is_given, selection_option
from rankscope.cli.terminal import (
    LONGEST_NAME,
    Paint,
    cut,
    echo_fitted,
    fitted,
    opened,
    say_unread,
    shortened,
    width,
)
from rankscope.cli.trees import FoldedTree, tree_lines
from rankscope.cli.view import (
    COLUMNS,
    View,
    complaint_lines,
    group_name,
    header_lines,
    parse_columns,
)
from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError
from rankscope.record.finding import Kind, Report, Severity, Verdict
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.texts import counted, visible
from rankscope.run.files import bytes_on_disk
from rankscope.run.folders import (
    CELLS_SUFFIX,
    REPLICA_FOLDER,
    SETTLED_SUFFIX,
    STEPS_FOLDER,
    TRACE_NAME,
    VALUES_NAME,
)
from rankscope.run.messages import progress
from rankscope.tree.alikemodules import number_of
from rankscope.tree.selection import parse_mode, parse_path, parse_phases, parse_ranges
from rankscope.tree.views import Step, Trace, steps_named
from rankscope.words.reports import answer_lines, verdict_line, when_text


def command(
    context: typer.Context,
    trace: TraceArgument = None,
    depth: Annotated[
        int | None, typer.Option(min=0, help="Levels of modules below the root.")
    ] = None,
    path: Annotated[str, selection_option("path", "all")] = "*",
    step: Annotated[str, selection_option("step", "the first one")] = "",
    mode: Annotated[str, selection_option("mode", "train where there is any")] = "",
    phase: Annotated[str, selection_option("phase", "all but setup")] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="Show this rank's own numbers.")] = None,
    stats: Annotated[
        str,
        typer.Option(
            metavar="COLUMNS",
            help=f"Of {' '.join(COLUMNS)}, with commas; or none; "
            "default by dtype: mean,std; count,min,max of integers; count,true of bools.",
        ),
    ] = "",
    slots: Annotated[
        str, typer.Option(metavar="GLOB", help="Slots to show; none for modules alone.")
    ] = "*",
    is_full: Annotated[
        bool, typer.Option("--full", help="Every call, placement and number of a step.")
    ] = False,
) -> None:
    """Show a trace on one screen: how complete, what is wrong, where ranks differ, which modules.
    With --full, or with a selection, its tree call by call.
    """
    view = View(
        depth=depth,
        path=parse_path(path),
        steps=parse_ranges("step", step) if step else None,
        mode=parse_mode(mode) if mode else None,
        phases=parse_phases(phase) if phase else View().phases,
        rank=rank,
        columns=parse_columns(stats),
        slots=slots,
    )
    read_trace, paint = opened(trace), Paint(sys.stdout)
    if {name for name in context.params if is_given(context, name)} - {"trace"}:
        echo_fitted(tree_lines(read_trace, view, paint))
    else:
        typed = "" if trace is None else shlex.quote(str(trace))
        echo_fitted(screen_rows(read_trace, view, paint, width(), typed))
    say_unread(read_trace)


# ---- one screen ----------------------------------------------------------------------------------

ROWS = 40
"""What fits a terminal that is not large."""
_MOST_NODES_BYTES = 32 << 20
_MOST_VALUES_BYTES = 512 << 20
"""Of a trace that is judged on the way, which takes three seconds at most: 2,000 modules on 256
ranks are. A larger one is left to `rankscope check`."""
_PLAIN_COLUMNS = 80
"""How wide rows are taken to be where no terminal says it."""
_MOST_PLACES = 3
"""Findings, and modules beside a finding, that are named one by one."""
_LEAST_OF_TREE = 8
_PLACE = "TRACE"
_WIDE = 160
"""Columns of a row of the tree, or of a command with its explanation, where no terminal bounds
them."""


def screen_rows(trace: Trace, view: View, paint: Paint, columns: int, typed: str) -> list[str]:
    """Return the rows of a screen, with the first step of a view, or that of the first fault.
    `columns`: 0 where rows may be of any length; `typed`: the trace as it may be typed, or nothing
    where commands find it."""
    report, unjudged = _judged(trace)
    origins = report.origins[:1] if report is not None else ()
    first = [(f.mode, f.step, f.evidence.get("incarnation", 0)) for f in origins]
    faulty = [step for step in trace.steps if (step.mode, step.step, step.incarnation) in first]
    groups = [*faulty, *view.groups(trace)]
    screen = _Screen(
        trace=trace,
        report=report,
        unjudged=unjudged,
        step=groups[0] if groups else None,
        paint=paint,
        columns=columns,
        place=_PLACE if len(typed) > (columns or _PLAIN_COLUMNS) // 2 else typed,
    )
    return screen.rows()


def _judged(trace: Trace) -> tuple[Report | None, str]:
    """Return the report of `check` on a trace, or why it was not asked."""
    folder = trace.path
    nodes = [folder / TRACE_NAME, *(folder / STEPS_FOLDER).glob("*.json")]
    for suffix in () if trace.is_written else (CELLS_SUFFIX, SETTLED_SUFFIX):
        nodes += (folder / REPLICA_FOLDER).glob(f"*{suffix}")
    parts = [folder / VALUES_NAME, *(folder / STEPS_FOLDER).glob("*.safetensors")]
    sizes = [_size(nodes), _size(parts)]
    if sizes[0] > _MOST_NODES_BYTES or sizes[1] > _MOST_VALUES_BYTES:
        return None, f"{sum(sizes) / 1e9:.1f} GB of records take longer"
    try:
        with progress() as say:
            return check(trace, progress=say), ""
    except RankscopeError as error:  # what can be read of the tree is shown all the same
        return None, " ".join(str(error).split())


def _size(files: list[Path]) -> int:
    """Return the bytes of those files that are there, without the holes in them."""
    return sum(bytes_on_disk(file.stat()) for file in files if file.is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Screen:
    trace: Trace
    report: Report | None
    unjudged: str
    """Why there is no report."""
    step: Step | None
    paint: Paint
    columns: int
    place: str
    """The trace in commands; `_PLACE` where its name is too long."""

    def rows(self) -> list[str]:
        above = [
            (header_lines(self.trace, self.paint), 4),
            (self._job_lines(), 2),
            (self._verdict_lines(), 3),
            (self._place_lines(), 2),
        ]
        rows = [row for lines, room in above for line in lines for row in self._fitted(line, room)]
        more = [row for line in self._more_lines() for row in self._fitted(line, 4)]
        if self.step is not None:
            room = max(ROWS - len(rows) - len(more), _LEAST_OF_TREE)
            rows += self._fitted(self.paint("bold", self._title(self.step)), 1)
            columns = self.columns or _WIDE
            tree = FoldedTree(self.trace, self.report, self.step, self.paint, columns)
            rows += tree.rows(room - 1, self._typed("show", "--depth 2 --slots none"))
        return [*rows[: ROWS - len(more)], *more]

    def _fitted(self, line: str, room: int) -> list[str]:
        """Return a line in rows that fit, at most so many; a pipe gets one row of that length."""
        if not self.columns:
            return [cut(line, room * _PLAIN_COLUMNS)]
        rows = [cut(row, self.columns) for row in fitted(line, self.columns)]
        if len(rows) > room:
            rows = [*rows[: room - 1], f"{cut(rows[room - 1], self.columns - 4)} ..."]
        return [row.rstrip() for row in rows]

    def _title(self, step: Step) -> str:
        title = group_name(self.trace, step)
        if step.is_setup:
            return f"{title}: what has parameters or buffers"
        if self.report and self.report.origins and step is not self.trace.steps[0]:
            return f"{title}, the first with a fault"
        return title

    def _typed(self, command: str, options: str = "") -> str:
        return " ".join(filter(None, ("rankscope", command, self.place, options)))

    def _job_lines(self) -> Iterator[str]:
        trace, paint = self.trace, self.paint
        if trace.steps:
            count = len({(step.mode, step.step) for step in trace.steps})
            yield f"{counted(count, 'step')}: {steps_named(trace.steps)}"
        yield from (paint("yellow", visible(event)) for event in trace.happened[:2])
        verify = self._typed("verify")
        lacking = [r["rank"] for r in trace.completeness["ranks"] if not r["complete"]]
        if lacking and not trace.is_live and not trace.is_complete:
            text = f"records of {ranks_named(lacking)}, or their end, are missing: {verify}"
            yield paint("yellow", text)
        complaints = list(complaint_lines(trace, paint))
        yield from complaints[:2]
        if len(complaints) > 2:
            yield paint("yellow", f"and {len(complaints) - 2} more: {verify}")

    def _verdict_lines(self) -> Iterator[str]:
        report, paint = self.report, self.paint
        if report is None:
            reason = f"{visible(self.unjudged)}: {self._typed('check')}"
            yield f"{paint('yellow', 'not judged')}: {reason}"
            return
        yield verdict_line(report, paint)
        # the second line of all has the exception that ended a rank
        is_crash = any(first.kind is Kind.CRASH for first in report.origins[:1])
        titles = ("look at",) if is_crash else ("first", "look at")
        yield from (f"  {line}" for line in answer_lines(report, *titles))
        if report.findings and not report.origins:
            yield f"  {visible(report.findings[0].message)}"
        for note in report.notes[:1] if report.verdict is not Verdict.CLEAN else ():
            yield paint("dim", f"  note: {visible(note)}")

    def _place_lines(self) -> Iterator[str]:
        """Yield on which ranks which values are wrong, where there are several ranks."""
        if self.report is None or self.step is None or len(self.trace.run["ranks"]) < 2:
            return
        lines = [*self._origin_lines(self.report), *_infected_lines(self.report)]
        yield from [self.paint("bold", "where"), *(f"  {line}" for line in lines)] if lines else ()

    def _origin_lines(self, report: Report) -> Iterator[str]:
        slots: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
        for origin in report.origins:
            place = (origin.path, origin.ranks, when_text(origin), origin.kind.value)
            slots.setdefault(place, []).append(origin.slot)
        are_many = len({kind for *_, kind in slots}) > 1
        for (path, ranks, when, kind), slot_names in [*slots.items()][:_MOST_PLACES]:
            slot = shortened(", ".join(map(visible, filter(None, slot_names))))
            name = f"{shortened(path or '(root)')}{f':{slot}' if slot else ''}"
            parts = [self.paint("red", name), shortened(ranks_named(ranks)), when]
            yield "  ".join([*parts, kind] if are_many else parts)
        if more := [*slots][_MOST_PLACES:]:
            kinds = ", ".join(sorted({kind for *_, kind in more}))
            who_text = shortened(ranks_named({rank for _, ranks, *_ in more for rank in ranks}))
            yield f"and in {counted(len(more), 'more place', 'more places')}  {who_text}  {kinds}"

    def _more_lines(self) -> Iterator[str]:
        trace, report = self.trace, self.report
        where = f" ({_PLACE} is the folder named in the first line)" * (self.place == _PLACE)
        yield self.paint("bold", f"see more{where}")
        asked: list[tuple[str, str]] = []
        if report is not None and report.origins:
            origin = report.origins[0]
            name = origin.path or "(root)"
            if len(name) <= LONGEST_NAME and name.isprintable():
                where = f"--path {shlex.quote(glob.escape(name))}"
                where += f" --step {origin.step}" if origin.step else ""
                asked.append((self._typed("show", where), "the module of the first fault"))
            asked.append((self._typed("check"), "the verdict with its evidence"))
        asked.append((self._typed("report"), "one page to look at in a browser"))
        if trace.steps:
            asked.append((self._typed("show", "--slots none"), "every call, without values"))
        asked.append((self._typed("show", "--full"), "every call, layout and number of a step"))
        if len(trace.steps) > 1:
            asked.append((self._typed("show", "--full --step all"), "of all steps"))
        widest, columns = max(len(command) for command, _ in asked), self.columns or _WIDE
        for command, purpose in asked:
            room = columns - len(purpose) - 4
            pad = " " * (widest - len(command) if widest <= room else 0)
            is_said = len(command) <= room
            yield f"  {command}{pad}  {self.paint('dim', purpose)}" if is_said else f"  {command}"


def _infected_lines(report: Report) -> Iterator[str]:
    of_place: dict[object, int] = {}
    for origin in report.origins:  # several values of one call have the same victims
        where = (origin.path, origin.phase, origin.ranks)
        of_place[where] = max(of_place.get(where, 0), origin.victims)
    if victims := sum(of_place.values()):
        by_phase: dict[str, list[str]] = {}
        for finding in report.findings:
            if not finding.is_origin and finding.severity is Severity.FAULT:
                by_phase.setdefault(finding.phase.word, []).append(finding.path)
        places = [f"{phase} {_tops(paths)}" for phase, paths in by_phase.items()]
        yield f"infected by that  {counted(victims, 'value')}  {'; '.join(places)}".rstrip()


def _tops(paths: Iterable[str]) -> str:
    """Return the outermost modules of paths, numbered ones together: `layers.17-23, norm`."""
    numbers: dict[str, set[int]] = {}
    for path in paths:
        parts = path.split(".") if path else ["(root)"]
        at = next((i for i, part in enumerate(parts) if number_of(part) is not None), None)
        stem = parts[0] if at is None else ".".join(parts[:at])
        numbers.setdefault(stem, set()).update(() if at is None else [int(parts[at])])
    if len(numbers) > 1:
        numbers.pop("(root)", None)
    names = (f"{stem}.{ranks_text(layers)}" if layers else stem for stem, layers in numbers.items())
    named = [*map(shortened, names)]
    return ", ".join([*named[:_MOST_PLACES], *(["..."] if len(named) > _MOST_PLACES else [])])
