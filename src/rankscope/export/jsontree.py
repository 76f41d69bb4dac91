"""`--format json`: the tree of a trace, as tree.json has it."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.errors import SelectionError
from rankscope.export.formats import ExportPlace, Selection
from rankscope.record.phases import Phase
from rankscope.record.texts import counted
from rankscope.run.folders import Progress
from rankscope.tree.jsontext import write_tree
from rankscope.tree.views import Trace


def write(
    trace: Trace, selection: Selection, place: ExportPlace, progress: Progress
) -> Sequence[str]:
    """Write the file; SelectionError: a part of a step is asked for, or a missing step."""
    has_part = selection.path != "*" or selection.wanted_ranks
    if has_part or selection.phases not in (frozenset(Phase), {Phase.SETUP}):
        raise SelectionError("--format json: writes whole steps; choose them with --step, --mode")
    steps = selection.groups(trace)
    with place.target.open("wb") as file:
        write_tree(
            trace, steps, progress, lambda text: file.write(text.encode(errors="backslashreplace"))
        )
    return (f"{counted(len(steps), 'step')} as one tree",)
