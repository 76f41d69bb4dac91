"""What ranks noted of a step."""

from __future__ import annotations

from rankscope.record.notes import NoteKind, RanksNote
from rankscope.tree.views import Step

__all__ = ["remarks"]


def remarks(step: Step) -> tuple[RanksNote, ...]:
    """Return the notes of a step but for the options of optimizers, which every train step has."""
    return tuple(e for e in step.notes if e.note.kind is not NoteKind.OPTIMIZER_OPTIONS)
