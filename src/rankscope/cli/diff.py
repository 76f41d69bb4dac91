"""`rankscope diff`: where a run first differs from a reference, whatever the topologies of both."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.cli.arguments import (
    CoverageOption,
    ExitCode,
    ForceOption,
    JsonOption,
    LayoutOption,
    part_of,
)
from rankscope.cli.checktext import (
    STYLES,
    first_lines,
    left_out_lines,
    listed_findings,
    painted_verdict,
)
from rankscope.cli.terminal import Paint, echo_fitted, echo_json, opened, progress, remark
from rankscope.compat.debugger.treefiles import trees_in
from rankscope.diagnosis.comparison.alignment import PathMap
from rankscope.diagnosis.comparison.diff import diff
from rankscope.diagnosis.finalreport import report_json
from rankscope.diagnosis.verdictwords import where_line
from rankscope.errors import FolderError, SettingError
from rankscope.page.diffpage import diff_page
from rankscope.page.pagefile import write_file
from rankscope.record.finding import Report, Verdict
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_text
from rankscope.run.outfolder import typed
from rankscope.tree.summary import counted, extent
from rankscope.tree.views import Trace

_MOST_REASONS = 3
_WORST_FIRST = (Verdict.FAULT, Verdict.INCOMPLETE, Verdict.CLEAN)


def command(
    ref: Annotated[
        Path,
        typer.Argument(
            metavar="REF", help="Trace of the run that is right, or what a debugger wrote."
        ),
    ],
    tests: Annotated[
        list[Path],
        typer.Argument(metavar="TEST...", help="Trace of the run in question; several: --matrix."),
    ],
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="REGEX=TEXT",
            help="Rewrite paths of TEST into those of REF; may be given several times.",
        ),
    ] = None,
    map_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules as for --map, one in a line.")
    ] = None,
    layout: LayoutOption = None,
    noise: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="REF once more, its inputs off by one rounding: the unit to judge TEST in.",
        ),
    ] = None,
    tensors: Annotated[
        bool,
        typer.Option(
            "--tensors/--no-tensors", help="Read full tensors that both kept: exact distances."
        ),
    ] = True,
    is_exact: Annotated[
        bool, typer.Option("--exact", help="Bitwise, by hashes: how much is equal, and what not.")
    ] = False,
    is_matrix: Annotated[
        bool, typer.Option("--matrix", help="Several runs in one table, a row each.")
    ] = False,
    require_coverage: CoverageOption = "0",
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page of both runs as well, to look at."),
    ] = None,
    is_forced: ForceOption = False,
    is_all: Annotated[bool, typer.Option("--all", help="List every origin and note.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say where TEST first differs from REF: module, ranks, how much; exit 1 where it does."""
    required = part_of(require_coverage)
    if len(tests) > 1 and not is_matrix:
        raise SettingError(
            f"{len(tests)} runs are to be held to {ref}", "give --matrix for a table"
        )

    if html is not None and (is_exact or is_matrix):
        raise SettingError("--html shows distances of one run: leave out --exact and --matrix")

    given = (ref, *tests, *(() if noise is None else (noise,)))
    reference, *runs = _opened(given, takes_printed=not is_exact)
    again = None if noise is None else runs.pop()
    paint = Paint(sys.stdout)

    def compared(test: Trace) -> Report:
        paths = PathMap(rules or ()) if map_file is None else PathMap.load(map_file, rules or ())
        with progress() as say:
            compare = functools.partial(
                diff, reference, test, paths=paths, layouts=layout, noise=again, tensors=tensors,
                exact=is_exact, progress=say,
            )  # fmt: skip
            if html is None:
                return compare()
            content, report = diff_page(reference, test, compare)
            write_file(content, html, is_forced=is_forced)
        return report

    reports = [compared(test) for test in runs]
    if as_json:
        data = [_report_json(report) for report in reports]
        named = [{"run": str(test), **each} for test, each in zip(tests, data)]
        worst = next(v for v in _WORST_FIRST if any(report.verdict is v for report in reports))
        echo_json("diff", worst.value, {"runs": named} if is_matrix else data[0])
    elif is_matrix:
        echo_fitted(_matrix_lines(ref, [*zip(tests, reports)], paint))
    else:
        echo_fitted(_difference_lines(reference, runs[0], reports[0], paint, is_all=is_all))
    if any(report.verdict is not Verdict.CLEAN for report in reports):
        raise typer.Exit(ExitCode.FINDING)
    report = min(reports, key=lambda each: each.coverage)
    if report.coverage < required:
        told = (
            f"{report.compared:,} of {report.recorded:,} values were compared "
            f"({report.coverage:.1%}), --require-coverage asks for {required:.1%}: trace both runs "
            f"with the same options, and say with --map and --layout what their names do not"
        )
        remark(told)
        raise typer.Exit(ExitCode.COVERAGE)


def _opened(paths: Sequence[Path], *, takes_printed: bool) -> list[Trace]:
    """Open traces, or what a module debugger wrote; FolderError: both are among them."""
    is_files = [bool(trees_in(path)) for path in paths]
    if not any(is_files):
        return [opened(path, takes_golden=True) for path in paths]
    if not all(is_files):
        files, other = paths[is_files.index(True)], paths[is_files.index(False)]
        if not other.exists():
            opened(other)  # which says so
        raise FolderError(
            f"{files} was written by a module debugger, and {other} holds no *_FULL_TENSORS.json",
            f"give two of one kind: {typed('export', other, out='FOLDER')} --format hf makes files "
            "of a trace that kept full tensors",
        )
    from rankscope.compat.debugger.filetrace import trace_of_files  # slow: torch

    with progress() as say:
        return [trace_of_files(path, say, takes_printed=takes_printed) for path in paths]


def _difference_lines(
    ref: Trace, test: Trace, report: Report, paint: Paint, *, is_all: bool = False
) -> Iterator[str]:
    """Yield the lines of a report: the first five are the answer, of hashes all that is said."""
    if report.equal is not None:
        yield from _equality_lines(report, report.equal, paint)
        return
    yield painted_verdict(report, paint)
    by_answer: dict[bool | None, list[str]] = {False: [], None: [], True: []}
    for _, is_same, text in report.preflight:
        by_answer[is_same].append(text)
    other, same = by_answer[False], by_answer[True]
    if other:
        yield f"  before any number: {paint('bold', '; '.join(other))}"
    elif same:
        yield f"  before any number: {'; '.join(same)}"
    yield from first_lines(report, paint)
    yield paint("dim", f"REF   {ref.path}  {extent(ref.run)}, {ref.state}")
    yield paint("dim", f"TEST  {test.path}  {extent(test.run)}, {test.state}")
    yield from listed_findings(report, is_all=is_all, paint=paint)
    yield ""
    yield from (f"the same: {text}" for text in same if other)
    yield from (f"not told: {text}" for text in by_answer[None])
    yield from left_out_lines(report, "not compared")


def _equality_lines(
    report: Report, equal: Mapping[Phase, tuple[int, int]], paint: Paint
) -> Iterator[str]:
    lacks = f"{report.lacks}; " if report.lacks else ""
    told = f"{_equal_count(equal):,} of {counted(report.compared, 'value')} are bitwise equal"
    yield f"{paint(STYLES[report.verdict], report.verdict.value)}: {lacks}{told}"
    for first in report.findings:
        before = counted(first.evidence["equal_before"], "value")
        yield f"  first: {paint('bold', first.message)} ({before} before it equal)"
        yield f"  where: {where_line(first)}"
    if not report.findings:
        yield "  first: none differs"
        yield "  where: nowhere"
    phases = [f"{phase.word} {own:,} of {total:,}" for phase, (own, total) in equal.items()]
    yield f"  equal by phase: {', '.join(phases) or 'none was compared'}"
    skipped = sorted(report.skipped, key=lambda each: -each.count)
    reasons = [f"{each.count:,}: {each.reason}" for each in skipped[:_MOST_REASONS]]
    reasons += ["..."] if len(skipped) > _MOST_REASONS else []
    if report.unpaired:
        reasons.append(f"{report.unpaired:,}: in one trace alone")
    yield f"  not comparable: {'; '.join(reasons) or 'none'}"


def _equal_count(equal: Mapping[Phase, tuple[int, int]]) -> int:
    return sum(own for own, _ in equal.values())


def _report_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON data, with how much is bitwise equal where hashes were compared."""
    if report.equal is None:
        return report_json(report)
    equal = _equal_count(report.equal)
    before = [finding.evidence["equal_before"] for finding in report.findings]
    phases = {p.word: {"equal": n, "compared": total} for p, (n, total) in report.equal.items()}
    counts = {"equal": equal, "equal_before": min(before, default=equal), "by_phase": phases}
    return {**report_json(report), "exact": counts}


def _matrix_lines(ref: Path, found: Sequence[tuple[Path, Report]], paint: Paint) -> Iterator[str]:
    head = ("run", "verdict", "compared", "kind", "ranks", "first")
    rows = [_matrix_row(path, report) for path, report in found]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    counts = Counter(report.verdict.value for _, report in found)
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    yield f"{counted(len(found), 'run')} held to {ref}: {told}"
    padded = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in (head, *rows)]
    yield paint("dim", "  ".join(padded[0]).rstrip())
    for row, (_, report) in zip(padded[1:], found):
        row[1] = paint(STYLES[report.verdict], row[1])
        yield "  ".join(row).rstrip()


def _matrix_row(path: Path, report: Report) -> tuple[str, ...]:
    run = (str(path), report.verdict.value, f"{report.compared:,} of {report.recorded:,}")
    if not report.origins:
        why = report.lacks or ("-" if report.verdict is Verdict.CLEAN else "records are missing")
        return (*run, "-", "-", why)
    first = report.origins[0]
    place = f"{first.path or '(root)'}{f':{first.slot}' if first.slot else ''}"
    when = f"{first.phase.word} of {first.mode.word} step {first.step}"
    more = len(report.origins) - 1
    others = f" and {counted(more, 'more origin')}" if more else ""
    return (*run, first.kind.value, ranks_text(first.ranks), f"{place}, {when}{others}")
