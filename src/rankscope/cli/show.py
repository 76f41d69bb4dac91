"""`rankscope show`: the tree of a trace, for the terminal."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from rankscope.cli.arguments import TraceArgument
from rankscope.record.statistics import COUNTS, NUMBERS

__all__ = ["command"]


def command(
    trace: TraceArgument = None,
    depth: Annotated[
        Optional[int], typer.Option(min=0, help="Levels of modules below the root.")  # noqa: UP045  # typer reads it on 3.10
    ] = None,
    path: Annotated[
        str, typer.Option(metavar="GLOB", help="Modules to show: fnmatch on the whole path.")
    ] = "*",
    step: Annotated[
        str,
        typer.Option(metavar="STEPS", help="Steps to show: 0-2,5 or all; default the first one."),
    ] = "",
    mode: Annotated[
        str, typer.Option(help="train or eval; default train where there is any.")
    ] = "",
    phase: Annotated[
        str,
        typer.Option(
            metavar="PHASES", help="Phases to show, separated by commas; default all but setup."
        ),
    ] = "",
    rank: Annotated[
        Optional[int], typer.Option(min=0, help="Show this rank's own numbers.")  # noqa: UP045  # typer reads it on 3.10
    ] = None,
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
) -> None:
    """Show the tree of a trace: calls, placements, numbers, and where ranks differ."""
    import sys

    from rankscope.cli.terminal import Paint, fitted, opened, say_unread, width
    from rankscope.cli.treetext import View, tree_lines

    view = View.parse(
        depth=depth,
        path=path,
        step=step,
        mode=mode,
        phase=phase,
        rank=rank,
        stats=stats,
        slots=slots,
    )
    columns = width()
    found = opened(trace)
    for line in tree_lines(found, view, Paint(sys.stdout)):
        for row in fitted(line, columns):
            typer.echo(row)
    say_unread(found)
