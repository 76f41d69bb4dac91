"""`rankscope recover`: from what hosts hold to a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.terminal import echo
from rankscope.companion.cleanup import is_in_tree, remove_run
from rankscope.companion.hostwatch import copy_what_is_held
from rankscope.run.agreements import held_anything
from rankscope.run.folders import TRACE_NAME
from rankscope.run.messages import progress
from rankscope.run.prepare import command_text
from rankscope.run.processes import is_abandoned
from rankscope.tree.build import recover


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
    keep_spool: Annotated[
        bool, typer.Option("--keep-spool", help="Leave the spool folders of this host in place.")
    ] = False,
) -> None:
    """Build a trace from the records in spool folders and unfinished trace folders.

    A spool folder of this host is removed once all it holds is in the trace; a trace folder never.
    """
    for folder in folders:
        if held_anything(folder) and is_abandoned(folder):
            copy_what_is_held(folder)
    with progress() as say:
        document = recover(folders, out, progress=say)
    state = document.completeness
    ranks = len({rank["rank"] for rank in state["ranks"]})
    word = "complete" if state["complete"] else f"incomplete: see {command_text('verify', out)}"
    echo(f"{out}: {ranks} of {document.run['world_size']} ranks, {word}")
    # where anything is missing the spools may be needed again, with what another host holds; and
    # where records were set aside, by a version that can read them
    has_all = all(r["committed"] == r["received"] and not r["notes"] for r in state["ranks"])
    if has_all and document.took_all and not state["missing"]:
        for folder in () if keep_spool else folders:
            _remove(folder, out)


def _remove(folder: Path, out: Path) -> None:
    tree = out / TRACE_NAME
    if is_abandoned(folder) and not remove_run(folder, lambda s: is_in_tree(folder, s, tree)):
        echo(f"removed {folder}: all of it is in {out}")
