"""`rankscope layout`: a layout file, proposed from what a run shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import ForceOption, TraceArgument
from rankscope.cli.terminal import echo, opened, say_unread
from rankscope.diagnosis.layoutproposal import LayoutProposal, propose_layout
from rankscope.errors import LayoutError
from rankscope.record.texts import counted
from rankscope.run.files import free_place, replacing


def command(
    trace: TraceArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to this new file; default stdout.")
    ] = None,
    is_forced: ForceOption = False,
) -> None:
    """Propose a layout file from what a run shows, with a reason for each line, to be edited."""
    read_trace = opened(trace)
    if int(read_trace.run["world_size"]) < 2:
        raise LayoutError(f"{read_trace.path}: the run had one rank, which holds everything whole")
    text = "\n".join(proposal_lines(propose_layout(read_trace), str(read_trace.path))) + "\n"
    say_unread(read_trace)
    if out is None:
        echo(text, is_line=False, end="")
        return
    try:
        with replacing(free_place(out, is_forced=is_forced), is_synced=False) as file:
            file.write(text.encode())
    except OSError as error:
        raise LayoutError(
            f"{out}: cannot be written: {error.strerror}; give another file with --out"
        ) from None
    echo(f"{out}: look it over, then: rankscope check {read_trace.path} --layout {out}")


def proposal_lines(proposal: LayoutProposal, source: str) -> Iterator[str]:
    """Yield the lines of a proposed layout file."""
    yield f"# Proposed by `rankscope layout` from {json.dumps(source, ensure_ascii=False)}."
    yield "# It rests on what this run did: look it over before you use it."
    if proposal.lacks:
        yield f"# The trace does not show a whole run ({proposal.lacks}): the rest may speak"
        yield "# against lines of this file. Better propose one from a run that went well."
    lie = "it lies" if proposal.undecided == 1 else "they lie"
    slots = counted(proposal.undecided, "slot is", "slots are")
    yield f"# {slots} left out: nothing shows how {lie}."
    yield from (f"# {reason}" for reason in proposal.axis_reasons)
    listed = ",".join(f"{axis}={size}" for axis, size in proposal.axes.items())
    yield f"axes = {json.dumps(listed)}"
    for entry in proposal.entries:
        yield ""
        yield "[[layout]]"
        yield from (f"# {reason}" for reason in entry.reasons)
        yield f"path = {json.dumps(entry.path, ensure_ascii=False)}"
        yield f"slot = {json.dumps(entry.slot, ensure_ascii=False)}"
        placed = ", ".join(f'{axis} = "{place}"' for axis, place in entry.placements.items())
        yield f"placements = {{ {placed} }}"
