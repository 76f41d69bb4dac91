"""Ranks of which steps of one number are not the same step of the training.

A rank's steps are counted by its optimizers' steps. Where one rank trains a model of its own
besides, or steps one of two models more often than others do, its n-th step is not theirs. What
tells is a step in which ranks stepped different models, though all of them step the same ones in
other steps: from then on nothing is compared between these ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankscope.diagnosis.candidates import Candidate
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.stepview import StepView
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named

__all__ = ["note_stepped_models", "without_uneven_steps"]

_OF_ONE_RANK = frozenset({Kind.NONFINITE, Kind.RECOMPUTE})
"""What needs no other rank to be seen."""


def note_stepped_models(step_view: StepView, context: CheckContext) -> None:
    """Keep which ranks stepped which models in this step, and whether all stepped the same."""
    stepped: dict[str, set[int]] = {}
    for call in step_view.of(Phase.GRADS):
        if call.parent is None:
            stepped.setdefault(call.path, set()).update(call.ranks.tolist())
    incarnation = context.incarnation(step_view.incarnation)
    incarnation.begins_late &= step_view.step > 0 or not stepped
    for root, ranks in stepped.items():
        incarnation.steppers.setdefault(root, set()).update(ranks)
    everyone = set().union(*stepped.values())
    if any(ranks != everyone for ranks in stepped.values()):
        incarnation.uneven[step_view.step] = stepped


def without_uneven_steps(
    candidates: Iterable[Candidate], context: CheckContext
) -> Iterator[Candidate]:
    """Yield the candidates but for what ranks differ in because they count their steps unlike."""
    for candidate in candidates:
        members = set(candidate.members.tolist())
        uneven = None if candidate.kind in _OF_ONE_RANK else _uneven(candidate, members, context)
        if uneven is None:
            yield candidate
            continue
        step, ranks = uneven
        context.coverage.note(
            f"in step {step} {ranks_named(ranks)} stepped another model than other ranks did, so "
            "steps of one number are not the same step on them: not compared from there on"
        )


def _uneven(
    candidate: Candidate, members: set[int], context: CheckContext
) -> tuple[int, set[int]] | None:
    """Return the first step up to this one in which members stepped different models, and which."""
    incarnation = context.incarnation(candidate.incarnation)
    for step, stepped in incarnation.uneven.items():
        if step > candidate.step and not incarnation.begins_late:
            continue
        everyone = set().union(*stepped.values()) & members
        for root, ranks in stepped.items():
            behind = (everyone - ranks) & incarnation.steppers[root]
            if behind and ranks & members:
                return step, behind
    return None
