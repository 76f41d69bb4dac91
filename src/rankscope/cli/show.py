"""`rankscope show`: a trace on one screen, or its tree call by call."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from rankscope.cli.arguments import TraceArgument, is_given, selection_option
from rankscope.cli.calltree import tree_lines
from rankscope.cli.screen import screen_rows
from rankscope.cli.terminal import Paint, echo_fitted, opened, say_unread, width
from rankscope.cli.view import COLUMNS, View, parse_columns
from rankscope.tree.selection import parse_mode, parse_path, parse_phases, parse_ranges


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
            help=f"Of {' '.join(COLUMNS)}, with commas; or none; "
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
    view = View(
        depth=depth,
        path=parse_path(path),
        steps=parse_ranges("step", step) if step else None,
        mode=parse_mode(mode) if mode else None,
        phases=parse_phases(phase) if phase else View().phases,
        rank=rank,
        columns=parse_columns(stats),
        slots=slots,
    )
    read_trace, paint = opened(trace), Paint(sys.stdout)
    if {name for name in context.params if is_given(context, name)} - {"trace"}:
        echo_fitted(tree_lines(read_trace, view, paint))
    else:
        typed = "" if trace is None else shlex.quote(str(trace))
        echo_fitted(screen_rows(read_trace, view, paint, width(), typed))
    say_unread(read_trace)
