"""`rankscope top`: where the ranks of a running job are, whom they wait for, how fast they are."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from rankscope.cli.arguments import LayoutOption, TraceArgument
from rankscope.cli.printing import echo
from rankscope.cli.terminal import Paint, width
from rankscope.cli.topsource import TopSource
from rankscope.cli.toptext import screen_lines
from rankscope.errors import FolderError, SettingError
from rankscope.live.jobsummary import SORTS
from rankscope.tree.reader import trace_folder

__all__ = ["command"]

EXIT_FINDING = 1


def command(
    trace: TraceArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: one JSON object on stdout.")
    ] = False,
    ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks to show: 0-3,8 or all.")
    ] = "all",
    sort: Annotated[
        str, typer.Option(metavar="rank|age|time", help="Order of the groups.")
    ] = "rank",
    judges: Annotated[
        bool, typer.Option("--check/--no-check", help="Say what is wrong, or do not.")
    ] = True,
    layout: LayoutOption = None,
) -> None:
    """Show where the ranks of a running job are, on one screen; q or Ctrl-C ends.

    Exit code with --once: 0 no fault so far; 1: `check` found a fault; 2: nothing can be said.
    """
    if sort not in SORTS:
        raise SettingError(f"--sort {sort}: expected {', '.join(SORTS)}")
    if as_json and not once:
        raise SettingError("--json prints one object: give --once with it")
    folder = trace_folder(trace)
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such folder")
    shown = TopSource(folder, layout=layout, judges=judges)
    shown.choose(ranks)
    shown.sort = sort
    try:
        if once:
            found = shown.one()
            if as_json:
                echo(json.dumps(found))
            else:
                columns = width()
                for line in screen_lines(found, Paint(sys.stdout), columns, 0):
                    echo(line)
            if found["check"]["verdict"] == "fault":
                raise typer.Exit(EXIT_FINDING)
            return
        if not sys.stdout.isatty():
            raise SettingError("stdout is no terminal: give --once, and --json for a program")
        from rankscope.cli.topscreen import show_until_left

        show_until_left(shown)
    finally:
        shown.close()
