"""`rankscope check`: what is wrong, where it began, and what followed from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from rankscope.cli.arguments import TraceArgument

__all__ = ["command"]

EXIT_FINDING = 1
EXIT_COVERAGE = 3


def command(
    trace: TraceArgument = None,
    layout: Annotated[
        Optional[Path],  # noqa: UP045  # typer reads it on 3.10
        typer.Option(
            metavar="FILE",
            envvar="RANKSCOPE_LAYOUT",
            help="Declared layouts, for tensors that no DTensor describes.",
        ),
    ] = None,
    require_coverage: Annotated[
        float,
        typer.Option(
            metavar="PART",
            min=0.0,
            max=1.0,
            help="Exit 3 where less than this part of the values was judged (0.9).",
        ),
    ] = 0.0,
    is_all: Annotated[bool, typer.Option("--all", help="List every finding, victims too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say which module, on which rank, went wrong first; exit 1 where something did."""
    import json
    import sys

    from rankscope.cli.checktext import coverage_line, report_lines
    from rankscope.cli.terminal import Paint, fitted, opened, progress, width
    from rankscope.diagnosis.check import check
    from rankscope.diagnosis.report import report_json
    from rankscope.layout.layoutfile import LayoutFile
    from rankscope.record.finding import Verdict

    layouts = None if layout is None else LayoutFile.load(layout)
    found = opened(trace)
    with progress() as say:
        report = check(found, layouts, progress=say)
    if as_json:
        typer.echo(json.dumps(report_json(report)))
    else:
        columns = width()
        for line in report_lines(found, report, Paint(sys.stdout), is_all=is_all):
            for row in fitted(line, columns):
                typer.echo(row)
    if report.verdict is not Verdict.CLEAN:
        raise typer.Exit(EXIT_FINDING)
    if report.coverage < require_coverage:
        typer.echo(f"rankscope: {coverage_line(report, require_coverage)}", err=True)
        raise typer.Exit(EXIT_COVERAGE)
