"""`rankscope capture`: have the next steps of a running job traced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from rankscope.cli.arguments import TraceArgument
from rankscope.cli.ordering import Ordering, Progress
from rankscope.cli.terminal import echo, remark
from rankscope.record.ranklists import ranks_named
from rankscope.run.jobstatus import OLD_S
from rankscope.run.outfolder import typed
from rankscope.settings import settings_from
from rankscope.tree.reader import trace_folder

EXIT_NOT_THERE = 1
EXIT_INTERRUPTED = 130
_LOOK_S = 0.2
_TOLD_S = 3.0
"""After so long a host whose relay has not seen the order is named."""


def command(
    trace: TraceArgument = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Trace the next N steps.")] = 1,
    paths: Annotated[
        str,
        typer.Option(metavar="GLOBS", help="Modules to trace besides those of the job's setting."),
    ] = "",
    tensors: Annotated[
        str,
        typer.Option(
            metavar="GLOBS", help="Full tensors to keep, as path:slot, besides those of the job."
        ),
    ] = "",
    waits: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the steps have arrived.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait; then exit code 1.")
    ] = 600.0,
) -> None:
    """Have all ranks of a running job trace the next steps; of a black box, those it holds.

    Exit code 0: the steps are there, or --no-wait; 1: not all of them, the order may still stand;
    2: nothing was ordered.
    """
    globs = settings_from({"paths": paths}, {}).paths if paths else ()
    kept = (settings_from({"tensors": tensors}, {}).tensors or ()) if tensors else ()
    ordering = Ordering(trace_folder(trace))
    try:
        ordering.place(steps=steps, paths=globs, tensors=kept)
        besides = f", with the modules {','.join(globs)}" if globs else ""
        besides += f", full tensors of {','.join(kept)}" if kept else ""
        count = "step" if steps == 1 else f"{steps} steps"
        echo(f"ordered: the next {count} of all traced ranks{besides}")
        if waits:
            _follow(ordering, seconds, has_wishes=steps > 1 or bool(globs or kept))
        else:
            echo(_reading(ordering))
    except KeyboardInterrupt:
        remark("the order stands")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _follow(ordering: Ordering, seconds: float, *, has_wishes: bool) -> None:
    began = time.monotonic()
    is_first_said = are_untold_said = False
    while True:
        found = ordering.look()
        now = time.monotonic()
        if found.first >= 0 and not is_first_said:
            is_first_said = True
            echo(f"{_steps(found)}{' are held and sent' if found.is_held else ': it is'}")
            if found.is_held and has_wishes:
                echo("of a job that holds its last steps back these are all one can have")
        if found.untold and not are_untold_said and now - began > _TOLD_S:
            are_untold_said = True
            for host, ranks in found.untold:
                remark(
                    f"{ranks_named(ranks)} on {host or 'an unknown host'}: no relay there has seen "
                    "the order in this folder"
                )
        is_unread = found.first >= 0 and found.unread_s > OLD_S and now - began > OLD_S
        if found.is_complete or found.is_job_over or is_unread or not now - began <= seconds:  # nan
            break
        time.sleep(_LOOK_S)
    if not found.is_job_over and found.first >= 0:
        for line in _came(found):
            echo(line)
    if found.is_complete:
        echo(_reading(ordering, found))
        return
    if found.is_job_over and found.first >= 0:
        echo(f"the job ended meanwhile: what came of {_steps(found)} is in the trace")
        echo(_reading(ordering, found))
    elif found.is_job_over:
        echo("the job ended before any rank took the order")
    elif is_unread:
        echo(
            f"the records were read {found.unread_s:.0f} s ago for the last time: whether "
            f"{_steps(found)} of {ranks_named(found.waited_for)} came is not known"
        )
        echo(_reading(ordering, found))
    elif found.first < 0:
        echo(f"no rank has taken the order in {seconds:g} s; it stands until the job ends")
    else:
        echo(f"{ranks_named(found.waited_for)} not there after {seconds:g} s; the order stands")
    raise typer.Exit(EXIT_NOT_THERE)


def _came(found: Progress) -> Iterator[str]:
    if found.arrived:
        yield f"there: {_steps(found)} of {ranks_named(found.arrived)}"
    missed: dict[int, list[int]] = {}
    for rank, step in found.missed:
        missed.setdefault(step, []).append(rank)
    for step, ranks in sorted(missed.items()):
        who = f"{ranks_named(sorted(ranks))}, which saw the order too late"
        yield f"missed: {found.mode.word} step {step} by {who}"


def _steps(found: Progress) -> str:
    if found.first == found.last:
        return f"{found.mode.word} step {found.first}"
    return f"{found.mode.word} steps {found.first}-{found.last}"


def _reading(ordering: Ordering, found: Progress | None = None) -> str:
    """Return the command that reads what came."""
    line = f"read it: {typed('show', ordering.folder)}"
    if found is None:
        return line
    chosen = f"{found.first}" if found.first == found.last else f"{found.first}-{found.last}"
    return f"{line} --step {chosen}{'' if found.mode.word == 'train' else ' --mode eval'}"
