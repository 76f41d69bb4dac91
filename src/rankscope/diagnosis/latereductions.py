"""Gradients that an optimizer reduces inside its own step are no fault.

They are read before the step and differ there as if a reduction had been forgotten. What tells is
the parameter: after the step, or the one that follows, it is the same on all these ranks, and not
what it was before. Asked only of steps in which no gradient agreed: one that lacks among reduced
ones is forgotten, whatever became of its parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rankscope.diagnosis.candidates import Candidate
from rankscope.diagnosis.context import CheckContext, ParameterUpdate
from rankscope.diagnosis.stepview import StepView
from rankscope.record.call import Phase
from rankscope.record.finding import Kind

__all__ = ["note_updates", "without_late_reductions"]


def note_updates(moment: StepView, scene: CheckContext) -> None:
    """Keep what became of the parameters of a step in which no gradient agreed, and of the next: a
    sharded optimizer may hand its part round behind its step. Call it before the step's parameters
    are remembered.
    """
    life = scene.life(moment.incarnation)
    if not life.apart or moment.step > max(life.apart) + 1:
        return
    for held in moment.values(Phase.PARAMS):
        before = life.parameters.get((held.call.path, held.slot))
        if before is not None and held.slot.startswith("param:"):
            key = (held.call.path, held.slot[6:])
            update = ParameterUpdate(
                held.ranks.copy(), held.hashes.copy(), before.ranks, before.hashes
            )
            life.updates.setdefault(key, {})[moment.step] = update


def without_late_reductions(
    suspects: Iterable[Candidate], scene: CheckContext
) -> Iterator[Candidate]:
    """Yield the suspects but for gradients that were reduced behind their reading."""
    for suspect in suspects:
        life = scene.life(suspect.incarnation)
        updates = life.updates.get((suspect.path, suspect.slot.partition(":")[2]), {})
        if suspect.step in life.apart and (
            (suspect.kind is Kind.GRADIENT and _moved_alike(suspect, updates))
            or (suspect.kind is Kind.PARAMETER and _moved_late(suspect, updates))
        ):
            scene.ledger.note(
                "gradients differ before the optimizer's step and their parameters are the same "
                "after it: reduced inside the step, so these gradients were not compared"
            )
        else:
            yield suspect


def _moved_late(suspect: Candidate, updates: Mapping[int, ParameterUpdate]) -> bool:
    following = updates.get(suspect.step + 1)
    return following is not None and following.of(suspect.members) == "alike"


def _moved_alike(suspect: Candidate, updates: Mapping[int, ParameterUpdate]) -> bool:
    steps = [step for step in (suspect.step, suspect.step + 1) if step in updates]
    found = [updates[step].of(suspect.members) for step in steps]
    return any(each == "alike" for each in found) and "apart" not in found
