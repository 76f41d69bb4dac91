"""`rankscope show`: a trace on one screen of at most `ROWS` rows (the job, the verdict, where ranks
differ, the tree to depth 2 with alike layers folded), or its tree call by call."""

from __future__ import annotations

import glob
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import TraceArgument, is_given, selection_option
from rankscope.cli.foldedtree import FoldedTree, shortened
from rankscope.cli.terminal import Paint, cut, echo, echo_fitted, fitted, opened, say_unread, width
from rankscope.cli.treetext import (
    View,
    complaint_lines,
    group_name,
    header_lines,
    parse_columns,
    tree_lines,
)
from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError
from rankscope.record.finding import Kind, Report, Severity, Verdict
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.record.texts import visible
from rankscope.run.filenames import (
    CELLS_SUFFIX,
    REPLICA_FOLDER,
    SETTLED_SUFFIX,
    STEPS_FOLDER,
    TRACE_NAME,
    VALUES_NAME,
)
from rankscope.run.files import bytes_on_disk
from rankscope.run.progressline import progress
from rankscope.tree.alikemodules import is_number, module_outlines
from rankscope.tree.selection import parse_mode, parse_path, parse_phases, parse_ranges
from rankscope.tree.summary import counted
from rankscope.tree.views import Step, Trace, steps_named
from rankscope.words.reports import answer_parts, verdict_line, when_text

ROWS = 40
"""What fits a terminal that is not large."""
_MOST_NODES_BYTES = 32 << 20
_MOST_VALUES_BYTES = 512 << 20
"""Of a trace that is judged on the way, which takes three seconds at most: 2,000 modules on 256
ranks are. A larger one is left to `rankscope check`."""
_PLAIN_COLUMNS = 80
"""How wide rows are taken to be where no terminal says it."""
_LONGEST_NAME = 40
_MOST_PLACES = 3
"""Findings, and modules beside a finding, that are named one by one."""
_LEAST_OF_TREE = 8
_WIDE = 160
"""Columns of a command with its explanation where no terminal bounds them."""


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
            help=f"Of {' '.join((*COUNTS, *NUMBERS, 'hash'))}, with commas; or none; "
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
    if not {name for name in context.params if is_given(context, name)} - {"trace"}:
        _show_summary(trace)
        return
    all_phases = frozenset(Phase) - {Phase.SETUP}
    view = View(
        depth=depth,
        path=parse_path(path),
        steps=parse_ranges("step", step) if step else None,
        mode=parse_mode(mode) if mode else None,
        phases=parse_phases(phase) if phase else all_phases,
        rank=rank,
        columns=parse_columns(stats),
        slots=slots,
    )
    read_trace = opened(trace)
    echo_fitted(tree_lines(read_trace, view, Paint(sys.stdout)))
    say_unread(read_trace)


def _show_summary(place: Path | None) -> None:
    read_trace = opened(place)
    report, unjudged = _judged(read_trace)
    named = "" if place is None else shlex.quote(str(place))
    for row in _summary_rows(read_trace, report, unjudged, Paint(sys.stdout), width(), named):
        echo(row)
    say_unread(read_trace)


def _judged(trace: Trace) -> tuple[Report | None, str]:
    """Return the report of `check` on a trace, or why it was not asked."""
    folder = trace.path
    nodes = [folder / TRACE_NAME, *(folder / STEPS_FOLDER).glob("*.json")]
    if not trace.is_written:
        suffixes = (CELLS_SUFFIX, SETTLED_SUFFIX)
        nodes += [
            file for suffix in suffixes for file in (folder / REPLICA_FOLDER).glob(f"*{suffix}")
        ]
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


def _summary_rows(
    trace: Trace, report: Report | None, unjudged: str, paint: Paint, columns: int, place: str
) -> list[str]:
    """Return the rows of a summary. `unjudged`: why there is no report; `columns`: 0 where rows may
    be of any length; `place`: the trace as it may be typed, or nothing where commands find it."""
    step = _step_shown(trace, report)
    roots = [] if step is None else module_outlines(step.nodes)
    named = "TRACE" if len(place) > (columns or _PLAIN_COLUMNS) // 2 else place
    rows: list[str] = []
    for line in header_lines(trace, paint):
        rows += _rows(line, columns, 4)
    for line in _job_lines(trace, paint, named):
        rows += _rows(line, columns, 2)
    for line in _verdict_lines(report, unjudged, paint, named):
        rows += _rows(line, columns, 3)
    if report is not None and step is not None and len(trace.run["ranks"]) > 1:
        places = [f"  {line}" for line in _finding_lines(report, paint)]
        if places:
            places.insert(0, paint("bold", "where"))
        for line in places:
            rows += _rows(line, columns, 2)
    lines = _more_lines(trace, report, step, paint, columns, named, is_short=named != place)
    more = [row for line in lines for row in _rows(line, columns, 4)]
    if step is not None:
        room = max(ROWS - len(rows) - len(more), _LEAST_OF_TREE)
        title = group_name(trace, step)
        if step.is_setup:
            title = f"{title}: what has parameters or buffers"
        elif report and report.origins and step is not trace.steps[0]:
            title = f"{title}, the first with a fault"
        rows += _rows(paint("bold", title), columns, 1)
        tree = FoldedTree(trace, report, roots, paint, columns)
        rows += tree.rows(room - 1, _typed("show", named, "--depth 2 --slots none"))
    return [*rows[: ROWS - len(more)], *more]


def _rows(line: str, columns: int, room: int) -> list[str]:
    """Return a line in rows that fit, at most so many; a pipe gets one row of that length."""
    if not columns:
        return [cut(line, room * _PLAIN_COLUMNS)]
    lines = [cut(row, columns) for row in fitted(line, columns)]
    if len(lines) > room:
        lines = [*lines[: room - 1], f"{cut(lines[room - 1], columns - 4)} ..."]
    return [row.rstrip() for row in lines]


def _step_shown(trace: Trace, report: Report | None) -> Step | None:
    """Return the step of the first fault, else the first step, else the setup."""
    for origin in report.origins[:1] if report else ():
        life = origin.evidence.get("incarnation", 0)
        for step in trace.steps:
            if (step.mode, step.step, step.incarnation) == (origin.mode, origin.step, life):
                return step
    for step in trace.steps:
        if step.mode is trace.default_mode:
            return step
    return next(iter(trace.setup), None)


def _job_lines(trace: Trace, paint: Paint, place: str) -> Iterator[str]:
    if trace.steps:
        count = len({(step.mode, step.step) for step in trace.steps})
        yield f"{counted(count, 'step')}: {steps_named(trace.steps)}"
    yield from (paint("yellow", visible(event)) for event in trace.happened[:2])
    lacking = [r for r in trace.completeness["ranks"] if not r["complete"]]
    if lacking and not trace.is_live and not trace.is_complete:
        ranks = ranks_named(rank["rank"] for rank in lacking)
        yield paint(
            "yellow", f"records of {ranks}, or their end, are missing: {_typed('verify', place)}"
        )
    complaints = list(complaint_lines(trace, paint))
    yield from complaints[:2]
    if len(complaints) > 2:
        yield paint("yellow", f"and {len(complaints) - 2} more: {_typed('verify', place)}")


def _typed(command: str, place: str, more: str = "") -> str:
    return " ".join(filter(None, ("rankscope", command, place, more)))


def _verdict_lines(report: Report | None, unjudged: str, paint: Paint, place: str) -> Iterator[str]:
    if report is None:
        yield f"{paint('yellow', 'not judged')}: {visible(unjudged)}: {_typed('check', place)}"
        return
    yield verdict_line(report, paint)
    for first in report.origins[:1]:
        # the second line of all has the exception that ended a rank
        titles = ("look at",) if first.kind is Kind.CRASH else ("first", "look at")
        parts = answer_parts(first)
        yield from (f"  {title}: {visible(parts[title])}" for title in titles)
    if report.findings and not report.origins:
        yield f"  {visible(report.findings[0].message)}"
    for note in report.notes[:1] if report.verdict is not Verdict.CLEAN else ():
        yield paint("dim", f"  note: {visible(note)}")


def _finding_lines(report: Report, paint: Paint) -> Iterator[str]:
    slots: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
    for origin in report.origins:
        place = (origin.path, origin.ranks, when_text(origin), origin.kind.value)
        slots.setdefault(place, []).append(visible(origin.slot))
    are_many = len({kind for *_, kind in slots}) > 1
    for (path, ranks, when, kind), slot_names in [*slots.items()][:_MOST_PLACES]:
        name = shortened(path or "(root)", _LONGEST_NAME)
        slot = shortened(", ".join(filter(None, slot_names)), _LONGEST_NAME)
        who_text = shortened(ranks_named(ranks), _LONGEST_NAME)
        parts = [paint("red", f"{name}:{slot}" if slot else name), who_text, when]
        yield "  ".join([*parts, kind] if are_many else parts)
    more = [*slots][_MOST_PLACES:]
    if more:
        kinds = ", ".join(sorted({kind for *_, kind in more}))
        their_ranks = {rank for _, ranks, *_ in more for rank in ranks}
        who_text = shortened(ranks_named(their_ranks), _LONGEST_NAME)
        yield f"and in {counted(len(more), 'more place', 'more places')}  {who_text}  {kinds}"
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
        at = next((i for i, part in enumerate(parts) if is_number(part)), None)
        stem = parts[0] if at is None else ".".join(parts[:at])
        numbers.setdefault(stem, set()).update(() if at is None else [int(parts[at])])
    if len(numbers) > 1:
        numbers.pop("(root)", None)
    names = (f"{stem}.{ranks_text(layers)}" if layers else stem for stem, layers in numbers.items())
    named = [shortened(name, _LONGEST_NAME) for name in names]
    return ", ".join([*named[:_MOST_PLACES], *(["..."] if len(named) > _MOST_PLACES else [])])


def _more_lines(
    trace: Trace,
    report: Report | None,
    step: Step | None,
    paint: Paint,
    columns: int,
    place: str,
    *,
    is_short: bool,
) -> Iterator[str]:
    title = "see more" + (" (TRACE is the folder named in the first line)" if is_short else "")
    yield paint("bold", title)
    asked: list[tuple[str, str]] = []
    if report is not None and report.origins:
        origin = report.origins[0]
        name = origin.path or "(root)"
        if len(name) <= _LONGEST_NAME and name.isprintable():
            where = f"--path {shlex.quote(glob.escape(name))}"
            where += f" --step {origin.step}" if origin.step else ""
            asked.append((_typed("show", place, where), "the module of the first fault"))
        asked.append((_typed("check", place), "the verdict with its evidence"))
    asked.append((_typed("report", place), "one page to look at in a browser"))
    if step is not None and trace.steps:
        asked.append((_typed("show", place, "--slots none"), "every call, without values"))
    asked.append((_typed("show", place, "--full"), "every call, layout and number of a step"))
    if len(trace.steps) > 1:
        asked.append((_typed("show", place, "--full --step all"), "of all steps"))
    wide = max(len(command) for command, _ in asked)
    for command, purpose in asked:
        line = f"  {command:<{wide}}  {paint('dim', purpose)}"
        fits = len(command) + len(purpose) + 4 <= (columns or _WIDE)
        if fits and wide + len(purpose) + 4 > (columns or _WIDE):
            line = f"  {command}  {paint('dim', purpose)}"
        yield line if fits else f"  {command}"
