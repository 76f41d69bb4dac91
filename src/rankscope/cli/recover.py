"""`rankscope recover`: from what hosts hold to a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...", help="Trace folders and spool folders, in any mixture."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="New trace folder; made with its parents, refused when it is not empty."),
    ],
) -> None:
    """Build a trace from the records in spool folders and unfinished trace folders."""
    from rankscope.cli.terminal import progress
    from rankscope.tree.assemble import recover

    with progress() as say:
        document = recover(folders, out, progress=say)
    state = document.completeness
    ranks = len({rank["rank"] for rank in state["ranks"]})
    word = "complete" if state["complete"] else f"incomplete: see rankscope verify {out}"
    typer.echo(f"{out}: {ranks} of {document.run['world_size']} ranks, {word}")
