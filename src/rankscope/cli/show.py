"""`rankscope show`: the tree of a trace, for the terminal."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from rankscope.cli.arguments import TraceArgument
from rankscope.cli.printing import echo
from rankscope.cli.summarytext import summary_lines
from rankscope.cli.terminal import Paint, echo_fitted, opened, progress, say_unread, width
from rankscope.cli.treetext import View, parse_columns, tree_lines
from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError
from rankscope.record.finding import Report
from rankscope.record.phases import Phase
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.run.filenames import (
    CELLS_SUFFIX,
    REPLICA_FOLDER,
    SETTLED_SUFFIX,
    STEPS_FOLDER,
    TRACE_NAME,
    VALUES_NAME,
)
from rankscope.run.filepieces import bytes_on_disk
from rankscope.tree.selection import parse_mode, parse_phase, parse_ranges
from rankscope.tree.views import Trace

__all__ = ["command"]


_MOST_NODES_BYTES = 32 << 20
_MOST_VALUES_BYTES = 512 << 20
"""Of a trace that is judged on the way, which takes three seconds at most: 2,000 modules on 256
ranks are. A larger one is left to `rankscope check`."""


def command(
    context: typer.Context,
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
    is_full: Annotated[
        bool, typer.Option("--full", help="Every call, placement and number of a step.")
    ] = False,
) -> None:
    """Show a trace on one screen: how complete, what is wrong, where ranks differ, which modules.
    With --full, or with a selection, its tree call by call.
    """
    given = {name for name in context.params if _is_given(context, name)}
    if not given - {"trace"}:
        _show_summary(trace)
        return
    every = frozenset(Phase) - {Phase.SETUP}
    view = View(
        depth=depth,
        path="" if path == "(root)" else path,
        steps=None if not step else () if step == "all" else tuple(parse_ranges("step", step)),
        mode=parse_mode(mode) if mode else None,
        phases=frozenset(map(parse_phase, phase.split(","))) if phase else every,
        rank=rank,
        columns=parse_columns(stats),
        slots=slots,
    )
    found = opened(trace)
    echo_fitted(tree_lines(found, view, Paint(sys.stdout)))
    say_unread(found)


def _is_given(context: typer.Context, name: str) -> bool:
    """True for what stands on the command line, also where that is the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _show_summary(place: Path | None) -> None:
    found = opened(place)
    report, unjudged = _judged(found)
    named = "" if place is None else shlex.quote(str(place))
    for row in summary_lines(
        found, report, Paint(sys.stdout), width(), unjudged=unjudged, place=named
    ):
        echo(row)
    say_unread(found)


def _judged(trace: Trace) -> tuple[Report | None, str]:
    """Return what `check` says of a trace, or why it was not asked."""
    folder = trace.path
    nodes = [folder / TRACE_NAME, *(folder / STEPS_FOLDER).glob("*.json")]
    if not trace.is_written:
        suffixes = (CELLS_SUFFIX, SETTLED_SUFFIX)
        nodes += [one for each in suffixes for one in (folder / REPLICA_FOLDER).glob(f"*{each}")]
    parts = [folder / VALUES_NAME, *(folder / STEPS_FOLDER).glob("*.safetensors")]
    sizes = [_size(nodes), _size(parts)]
    if sizes[0] > _MOST_NODES_BYTES or sizes[1] > _MOST_VALUES_BYTES:
        return None, f"{sum(sizes) / 1e9:.1f} GB of records take longer"
    try:
        with progress() as say:
            return check(trace, progress=say), ""
    except RankscopeError as error:  # what can be read of the tree is shown all the same
        return None, " ".join(str(error).split())


def _size(files: list[Path]) -> int:
    """Return the bytes of those files that are there, without the holes in them."""
    return sum(bytes_on_disk(file.stat()) for file in files if file.is_file())
