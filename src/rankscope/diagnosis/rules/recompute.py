"""What activation checkpointing computes the second time is what it computed the first time.

A recomputed call is held to the forward call of its path and micro-batch that had the same inputs
on a rank (a module called twice is recomputed last call first). Calls that the recomputation did
not reach are no fault: checkpointing stops once it has what backward needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import rounding_of
from rankscope.diagnosis.stepview import CallView, SlotValues, StepView, is_output
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named
from rankscope.tree.jsontext import statistic

__all__ = ["changed_recomputations"]

Array = NDArray[Any]
_FEW: Final = 4


def changed_recomputations(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every output that came out otherwise when it was recomputed."""
    for again in step_view.of(Phase.RECOMPUTE):
        firsts = [
            call
            for call in step_view.named(again.path)
            if call.phase is Phase.FORWARD and call.micro_batch == again.micro_batch
        ]
        if not firsts:
            continue
        for slot, values in again.slots.items():
            if not is_output(slot, Phase.RECOMPUTE) or values.dtype == "python":
                continue
            compared, wrong, first = _compare(again, values, firsts)
            if compared:
                context.coverage.applied(values)
            if len(wrong) and first is not None:
                yield _candidate(step_view, values, first, wrong)


def _compare(
    again: CallView, values: SlotValues, firsts: list[CallView]
) -> tuple[bool, Array, SlotValues | None]:
    """Return whether any rank could be compared, the ranks that differ, and from what."""
    wrong: list[int] = []
    compared, against = False, None
    for rank, place in zip(values.ranks.tolist(), range(len(values.ranks))):
        if not values.is_known[place]:
            continue
        like = [call for call in firsts if _has_inputs_of(call, again, rank)]
        olds = [old for call in like if (old := _at(call, values.slot, rank)) is not None]
        if not olds:
            continue
        compared = True
        if not any(_is_same(values, place, old, where) for old, where in olds):
            wrong.append(rank)
            against = olds[0][0]
    return compared, np.array(wrong, np.int64), against


def _at(call: CallView, slot: str, rank: int) -> tuple[SlotValues, int] | None:
    old = call.slots.get(slot)
    if old is None:
        return None
    place = int(old.at(np.array([rank]))[0])
    return (old, place) if place >= 0 and old.is_known[place] else None


def _has_inputs_of(call: CallView, again: CallView, rank: int) -> bool:
    """True where both calls got the same on this rank, as far as it is known."""
    for values in again.inputs:
        place = int(values.at(np.array([rank]))[0])
        old = _at(call, values.slot, rank)
        if place < 0 or not values.is_known[place] or old is None:
            continue
        if not _is_same(values, place, *old):
            return False
    return True


def _is_same(values: SlotValues, place: int, old: SlotValues, where: int) -> bool:
    if values.counts[place] != old.counts[where]:
        return False
    if values.hashes[place] == old.hashes[where]:
        return True
    mine, other = values.column("sketch")[place], old.column("sketch")[where]
    norm = max(values.column("l2")[place], old.column("l2")[where])
    apart = np.sqrt(np.mean((mine - other) ** 2))
    return bool(np.isfinite(apart) and apart <= rounding_of(values.dtype) * norm)


def _candidate(
    step_view: StepView, values: SlotValues, first: SlotValues, wrong: Array
) -> Candidate:
    def numbers(value: SlotValues, rank: int) -> dict[str, Any]:
        place = int(value.at(np.array([rank]))[0])
        return {
            "rank": rank,
            "phase": value.call.phase.word,
            **{n: statistic(float(value.column(n)[place])) for n in ("mean", "std", "l2")},
            "hash": f"{int(value.hashes[place]):016x}",
        }

    def evidence() -> dict[str, Any]:
        few = wrong.tolist()[:_FEW]
        return {"values": [numbers(value, rank) for rank in few for value in (first, values)]}

    return candidate_of(
        step_view,
        values,
        Kind.RECOMPUTE,
        wrong,
        f"{ranks_named(wrong.tolist())} recomputed another value than forward had, from the same "
        f"inputs",
        evidence=evidence,
    )
