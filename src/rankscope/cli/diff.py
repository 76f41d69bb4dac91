"""`rankscope diff`: where a run first differs from a reference, whatever the topologies of both."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import (
    CoverageOption,
    ExitCode,
    ForceOption,
    JsonOption,
    LayoutOption,
    required_coverage_part,
)
from rankscope.cli.terminal import Paint, echo_fitted, echo_json, opened, remark
from rankscope.compat.debugger.treefiles import trees_in
from rankscope.diagnosis.comparison.alignment import PathMap
from rankscope.diagnosis.comparison.diff import diff
from rankscope.errors import FolderError, SettingError
from rankscope.record.finding import Report, Verdict
from rankscope.run.messages import progress
from rankscope.run.prepare import command_text
from rankscope.tree.views import Trace
from rankscope.words.page.pagecontent import write_file
from rankscope.words.page.pages import diff_page
from rankscope.words.reports import coverage_line, matrix_lines, report_json, report_lines

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
    required = required_coverage_part(require_coverage)
    if len(tests) > 1 and not is_matrix:
        raise SettingError(
            f"{len(tests)} runs are to be held to {ref}", "give --matrix for a table"
        )

    if html is not None and (is_exact or is_matrix):
        raise SettingError("--html shows distances of one run: leave out --exact and --matrix")

    places = (ref, *tests, *(() if noise is None else (noise,)))
    reference, *runs = _opened(places, takes_printed=not is_exact)
    noise_trace = None if noise is None else runs.pop()
    paint = Paint(sys.stdout)

    def compared(test: Trace) -> Report:
        paths = PathMap(rules or ()) if map_file is None else PathMap.load(map_file, rules or ())
        with progress() as say:
            compare = functools.partial(
                diff, reference, test, paths=paths, layouts=layout, noise=noise_trace,
                tensors=tensors, exact=is_exact, progress=say,
            )  # fmt: skip
            if html is None:
                return compare()
            content, report = diff_page(reference, test, compare)
            write_file(content, html, is_forced=is_forced)
        return report

    reports = [compared(test) for test in runs]
    if as_json:
        data = [report_json(report) for report in reports]
        named = [{"run": str(test), **fields} for test, fields in zip(tests, data)]
        worst = next(v for v in _WORST_FIRST if any(report.verdict is v for report in reports))
        echo_json("diff", worst.value, {"runs": named} if is_matrix else data[0])
    elif is_matrix:
        echo_fitted(matrix_lines(str(ref), [*zip(map(str, tests), reports)], paint))
    else:
        sides = (("REF", reference), ("TEST", runs[0]))
        about = [f"{name:<5} {s.path}  {s.about}" for name, s in sides]
        echo_fitted(report_lines(reports[0], about, paint, is_all=is_all))
    if any(report.verdict is not Verdict.CLEAN for report in reports):
        raise typer.Exit(ExitCode.FINDING)
    report = min(reports, key=lambda run: run.coverage)
    if report.coverage < required:
        remark(coverage_line(report, required))
        raise typer.Exit(ExitCode.COVERAGE)


def _opened(paths: Sequence[Path], *, takes_printed: bool) -> list[Trace]:
    """Open traces, or what a module debugger wrote; FolderError: both are among them."""
    is_files = [bool(trees_in(path)) for path in paths]
    if not any(is_files):
        return [opened(path, takes_golden=True) for path in paths]
    if not all(is_files):
        files, folder = paths[is_files.index(True)], paths[is_files.index(False)]
        if not folder.exists():
            opened(folder)  # which says so
        raise FolderError(
            f"{files} was written by a module debugger, and {folder} holds no *_FULL_TENSORS.json",
            f"give two of one kind: {command_text('export', folder, out='FOLDER')} --format hf "
            "makes files of a trace that kept full tensors",
        )
    from rankscope.compat.debugger.filetrace import trace_of_files  # slow: torch

    with progress() as say:
        return [trace_of_files(path, say, takes_printed=takes_printed) for path in paths]
