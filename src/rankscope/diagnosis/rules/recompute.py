"""What activation checkpointing computes the second time is what it computed the first time.

A recomputed call is held to the forward call of its path and micro-batch that had the same inputs
on a rank (a module called twice is recomputed last call first). Calls that the recomputation did
not reach are no fault: checkpointing stops once it has what backward needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.tree.jsontext import statistic

_FEW: Final = 4


def changed_recomputations(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every output that came out otherwise when it was recomputed."""
    for again in step_view.of(Phase.RECOMPUTE):
        firsts = [
            call
            for call in step_view.named(again.path)
            if call.phase is Phase.FORWARD and call.micro_batch == again.micro_batch
        ]
        for values in again.outputs:
            firsts_of = [
                (call, call.slots[values.slot]) for call in firsts if values.slot in call.slots
            ]
            answers = np.array(
                [_compared(again, call, values, old) for call, old in firsts_of], np.int8
            ).reshape(-1, len(values.ranks))
            is_compared = (answers >= 0).any(axis=0)
            if is_compared.any():
                step_view.context.coverage.applied(values)
            wrong = np.flatnonzero(is_compared & ~(answers == 1).any(axis=0))
            if len(wrong):
                _, first = firsts_of[int((answers[:, wrong[-1]] >= 0).argmax())]
                yield _candidate(step_view, values, first, values.ranks[wrong])


def _compared(again: CallView, call: CallView, values: SlotValues, old: SlotValues) -> Array:
    """Return for every rank what `_alike` does, and -1 where the inputs were others."""
    has_inputs = np.ones(len(values.ranks), bool)
    for given in again.inputs:
        if given.slot in call.slots:
            has_inputs &= _alike(given, call.slots[given.slot], values.ranks) != 0
    return np.where(has_inputs, _alike(values, old, values.ranks), -1)


@np.errstate(invalid="ignore", over="ignore")
def _alike(values: SlotValues, old: SlotValues, ranks: Array) -> Array:
    """Return for every rank 1: alike within rounding, 0: not, -1: one is not known."""
    at, there = values.at(ranks), old.at(ranks)
    is_known = (at >= 0) & (there >= 0) & values.is_known[at] & old.is_known[there]
    between = values.column("sketch")[at] - old.column("sketch")[there]
    apart = np.sqrt(np.mean(between**2, axis=1))
    norms = np.maximum(values.column("l2")[at], old.column("l2")[there])
    is_near = np.isfinite(apart) & (apart <= rounding_of(values.dtype) * norms)
    is_same = (values.hashes[at] == old.hashes[there]) | is_near
    return np.where(is_known, is_same & (values.counts[at] == old.counts[there]), -1)


def _candidate(
    step_view: JudgedStep, values: SlotValues, first: SlotValues, wrong: Array
) -> Candidate:
    def numbers(value: SlotValues, rank: int) -> dict[str, Any]:
        place = int(value.at(np.array([rank]))[0])
        return {
            "rank": rank,
            "phase": value.call.phase.word,
            **{n: statistic(float(value.column(n)[place])) for n in ("mean", "std", "l2")},
            "hash": f"{int(value.hashes[place]):016x}",
        }

    few = wrong.tolist()[:_FEW]
    return step_view.candidate(
        values,
        Kind.RECOMPUTE,
        wrong,
        f"{ranks_named(wrong)} recomputed another value than forward had, from the same inputs",
        evidence=lambda: {
            "values": [numbers(value, rank) for rank in few for value in (first, values)]
        },
    )
