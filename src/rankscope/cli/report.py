"""`rankscope report`: verdict, map and values of a trace in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import ForceOption, LayoutOption, TraceArgument, selection_option
from rankscope.cli.terminal import echo, opened, say_unread
from rankscope.run.messages import progress
from rankscope.tree.selection import parse_path, parse_ranges
from rankscope.words.page.pagecontent import write_file
from rankscope.words.page.pages import check_page


def command(
    trace: TraceArgument = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file; a page that is there is replaced.")
    ] = Path("report.html"),
    path: Annotated[str, selection_option("path", "all")] = "*",
    step: Annotated[str, selection_option("step", "all")] = "",
    layout: LayoutOption = None,
    is_forced: ForceOption = False,
) -> None:
    """Write a page that needs no network and no server: what went wrong, and where, to look at."""
    steps = parse_ranges("step", step)
    read_trace = opened(trace)
    with progress() as say:
        content, _ = check_page(
            read_trace, layout, path=parse_path(path), steps=steps, progress=say
        )
        write_file(content, out, is_forced=is_forced)
    say_unread(read_trace)
    echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB; open it in a browser")
