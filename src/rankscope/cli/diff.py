"""`rankscope diff`: where a run first differs from a reference, whatever the topologies of both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from rankscope.cli.arguments import EXIT_COVERAGE, CoverageOption, LayoutOption, part_of

__all__ = ["command"]

EXIT_FINDING = 1


def command(
    ref: Annotated[Path, typer.Argument(metavar="REF", help="Trace of the run that is right.")],
    test: Annotated[Path, typer.Argument(metavar="TEST", help="Trace of the run in question.")],
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
    require_coverage: CoverageOption = "0",
    is_all: Annotated[bool, typer.Option("--all", help="List every origin and note.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say where TEST first differs from REF: module, ranks, how much; exit 1 where it does."""
    import json
    import sys

    from rankscope.cli.difftext import bitwise_json, bitwise_lines, difference_lines
    from rankscope.cli.terminal import Paint, fitted, opened, progress, width
    from rankscope.diagnosis.comparison.alignment import PathMap
    from rankscope.diagnosis.comparison.bitwise import diff_bitwise
    from rankscope.diagnosis.comparison.diff import diff
    from rankscope.diagnosis.report import report_json
    from rankscope.errors import SettingError
    from rankscope.layout.layoutfile import LayoutFile
    from rankscope.record.finding import Verdict

    required = part_of(require_coverage)
    paths = PathMap(rules or ()) if map_file is None else PathMap.load(map_file, rules or ())
    layouts = None if layout is None else LayoutFile.load(layout)
    if is_exact and noise is not None:
        raise SettingError("--exact compares hashes, --noise is about distances: give one of both")
    traces = opened(ref), opened(test)
    paint = Paint(sys.stdout)
    with progress() as say:
        if is_exact:
            exact = diff_bitwise(*traces, paths=paths, layouts=layouts, progress=say)
            report, lines = exact.report, bitwise_lines(exact, paint)
        else:
            again = None if noise is None else opened(noise)
            report = diff(
                *traces, paths=paths, layouts=layouts, noise=again, tensors=tensors, progress=say
            )
            lines = difference_lines(*traces, report, paint, is_all=is_all)
    if as_json:
        typer.echo(json.dumps(bitwise_json(exact) if is_exact else report_json(report)))
    else:
        columns = width()
        for line in lines:
            for row in fitted(line, columns):
                typer.echo(row)
    if report.verdict is not Verdict.CLEAN:
        raise typer.Exit(EXIT_FINDING)
    if report.coverage < required:
        told = (
            f"{report.compared:,} of {report.recorded:,} values were compared "
            f"({report.coverage:.1%}), --require-coverage asks for {required:.1%}: trace both runs "
            f"with the same options, and say with --map and --layout what their names do not"
        )
        typer.echo(f"rankscope: {told}", err=True)
        raise typer.Exit(EXIT_COVERAGE)
