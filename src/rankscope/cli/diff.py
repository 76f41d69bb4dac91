"""`rankscope diff`: where a run first differs from a reference, whatever the topologies of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from rankscope.cli.arguments import EXIT_COVERAGE, CoverageOption, LayoutOption, part_of
from rankscope.cli.difftext import bitwise_json, bitwise_lines, difference_lines, matrix_lines
from rankscope.cli.printing import echo
from rankscope.cli.terminal import Paint, echo_fitted, opened, progress
from rankscope.diagnosis.comparison.alignment import PathMap
from rankscope.diagnosis.comparison.bitwise import diff_bitwise
from rankscope.diagnosis.comparison.diff import diff
from rankscope.diagnosis.finalreport import report_json
from rankscope.errors import SettingError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.page.diffpage import diff_page
from rankscope.page.pagefile import write_file
from rankscope.record.finding import Report, Verdict
from rankscope.tree.views import Trace

__all__ = ["command"]

EXIT_FINDING = 1


def command(
    ref: Annotated[Path, typer.Argument(metavar="REF", help="Trace of the run that is right.")],
    tests: Annotated[
        list[Path],
        typer.Argument(metavar="TEST...", help="Trace of the run in question; several: --matrix."),
    ],
    rules: Annotated[
        Optional[list[str]],  # noqa: UP045  # typer reads it on 3.10
        typer.Option(
            "--map",
            metavar="REGEX=TEXT",
            help="Rewrite paths of TEST into those of REF; may be given several times.",
        ),
    ] = None,
    map_file: Annotated[
        Optional[Path],  # noqa: UP045  # as above
        typer.Option(metavar="FILE", help="Rules as for --map, one in a line."),
    ] = None,
    layout: LayoutOption = None,
    noise: Annotated[
        Optional[Path],  # noqa: UP045  # as above
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
        Optional[Path],  # noqa: UP045  # as above
        typer.Option(metavar="FILE", help="Write a page of both runs as well, to look at."),
    ] = None,
    is_all: Annotated[bool, typer.Option("--all", help="List every origin and note.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, no text.")] = False,
) -> None:
    """Say where TEST first differs from REF: module, ranks, how much; exit 1 where it does."""
    required = part_of(require_coverage)
    layouts = None if layout is None else LayoutFile.load(layout)
    if is_exact and noise is not None:
        raise SettingError("--exact compares hashes, --noise is about distances: give one of both")
    if len(tests) > 1 and not is_matrix:
        raise SettingError(
            f"{len(tests)} runs are to be held to {ref}", "give --matrix for a table"
        )

    if html is not None and (is_exact or is_matrix):
        raise SettingError("--html shows distances of one run: leave out --exact and --matrix")

    reference, *runs = [opened(path, takes_golden=True) for path in (ref, *tests)]
    again = None if noise is None else opened(noise, takes_golden=True)
    paint = Paint(sys.stdout)

    def compared(test: Trace) -> tuple[Report, Iterator[str], dict[str, Any]]:
        paths = PathMap(rules or ()) if map_file is None else PathMap.load(map_file, rules or ())
        with progress() as say:
            if is_exact:
                exact = diff_bitwise(reference, test, paths=paths, layouts=layouts, progress=say)
                return exact.report, bitwise_lines(exact, paint), bitwise_json(exact)
            if html is None:
                report = diff(
                    reference, test, paths=paths, layouts=layouts, noise=again, tensors=tensors,
                    progress=say,
                )  # fmt: skip
            else:
                content, report = diff_page(
                    reference, test, paths=paths, layouts=layouts, noise=again, tensors=tensors,
                    progress=say,
                )  # fmt: skip
                write_file(content, html)
        lines = difference_lines(reference, test, report, paint, is_all=is_all)
        return report, lines, report_json(report)

    found = [compared(test) for test in runs]
    reports = [report for report, _, _ in found]
    lines = found[0][1]
    if is_matrix:
        lines = matrix_lines(ref, [*zip(tests, reports)], paint)
    if as_json:
        named = [{"run": str(test), **data} for test, (_, _, data) in zip(tests, found)]
        echo(json.dumps(named if is_matrix else found[0][2]))
    else:
        echo_fitted(lines)
    if any(report.verdict is not Verdict.CLEAN for report in reports):
        raise typer.Exit(EXIT_FINDING)
    report = min(reports, key=lambda each: each.coverage)
    if report.coverage < required:
        told = (
            f"{report.compared:,} of {report.recorded:,} values were compared "
            f"({report.coverage:.1%}), --require-coverage asks for {required:.1%}: trace both runs "
            f"with the same options, and say with --map and --layout what their names do not"
        )
        echo(f"rankscope: {told}", err=True)
        raise typer.Exit(EXIT_COVERAGE)
