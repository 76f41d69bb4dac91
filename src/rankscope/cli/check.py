"""`rankscope check`: what is wrong, where it began, and what followed from it."""

from __future__ import annotations

from math import nan
from typing import Annotated

import typer

from rankscope.cli.arguments import LayoutOption, TraceArgument

__all__ = ["command"]

EXIT_FINDING = 1
EXIT_COVERAGE = 3


def command(
    trace: TraceArgument = None,
    layout: LayoutOption = None,
    require_coverage: Annotated[
        str,
        typer.Option(
            metavar="PART",
            help="Exit 3 where less than this part of the values was judged (0.9 or 90%).",
        ),
    ] = "0",
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

    required = _part(require_coverage)
    layouts = None if layout is None else LayoutFile.load(layout)
    found = opened(trace)
    given = str(layout or found.run.get("layout", {}).get("file", ""))
    with progress() as say:
        report = check(found, layouts, progress=say)
    if as_json:
        typer.echo(json.dumps(report_json(report)))
    else:
        columns = width()
        for line in report_lines(found, report, Paint(sys.stdout), is_all=is_all, layout=given):
            for row in fitted(line, columns):
                typer.echo(row)
    if report.verdict is not Verdict.CLEAN:
        raise typer.Exit(EXIT_FINDING)
    if report.coverage < required:
        typer.echo(f"rankscope: {coverage_line(report, required, given)}", err=True)
        raise typer.Exit(EXIT_COVERAGE)


def _part(text: str) -> float:
    """Return the part of all values that `--require-coverage` asks for, 0.0 to 1.0.

    Raises:
        SettingError: it is none.
    """
    from rankscope.errors import SettingError

    word = text.strip()
    try:
        part = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        part = nan
    if 0 <= part <= 1:
        return part
    if 1 < part <= 100 and not word.endswith("%"):
        remedy = f"for {word} in a hundred, write {word}% or {part / 100:g}"
    else:
        remedy = "give a part of 1 or a percentage, as in 0.9 or 90%"
    raise SettingError(f"--require-coverage {text}: expected a part from 0 to 1", remedy)
