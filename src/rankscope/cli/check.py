"""`rankscope check`: what is wrong, where it began, and what followed from it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rankscope.cli.arguments import (
    CoverageOption,
    ExitCode,
    JsonOption,
    LayoutOption,
    TraceArgument,
    required_coverage_part,
)
from rankscope.cli.terminal import Paint, echo_fitted, echo_json, opened, remark
from rankscope.diagnosis.check import check
from rankscope.record.finding import Verdict
from rankscope.run.messages import progress
from rankscope.words.reports import coverage_line, report_json, report_lines


def command(
    trace: TraceArgument = None,
    layout: LayoutOption = None,
    require_coverage: CoverageOption = "0",
    is_all: Annotated[bool, typer.Option("--all", help="List every finding, victims too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which module, on which rank, went wrong first; exit 1 where something did."""
    required = required_coverage_part(require_coverage)
    read_trace = opened(trace)
    with progress() as say:
        report = check(read_trace, layout, progress=say)
    if as_json:
        echo_json("check", report.verdict.value, report_json(report))
    else:
        about = [f"{read_trace.path}  {read_trace.about}"]
        echo_fitted(report_lines(report, about, Paint(sys.stdout), is_all=is_all))
    if report.verdict is not Verdict.CLEAN:
        raise typer.Exit(ExitCode.FINDING)
    if report.coverage < required:
        remark(coverage_line(report, required))
        raise typer.Exit(ExitCode.COVERAGE)
