"""Ranks whose gradients are reduced train one model: they began with the same weights.

Plain parameters that differ at setup may be shards. They are none where the first gradient of one
that is no constant is the same on these ranks though its module was handed different values there:
only a reduction makes that so, and what was reduced belongs to replicas. (The first gradient of an
adapter is zero where its other half begins as zero.) Weights that were made equal between setup and
the optimizer step (a broadcast after a first forward) are no fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import differing_sides, minority, sides_text
from rankscope.diagnosis.replicas import clusters
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named

__all__ = ["other_weights"]

Array = NDArray[Any]


def other_weights(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every parameter that differed at setup on ranks that share its
    gradient. Asked of each parameter once in an incarnation, in the first optimizer step in which
    its gradient is no constant."""
    incarnation = context.incarnation(step_view.incarnation)
    gradients = {_key(values): values for values in step_view.values(Phase.GRADS)}
    setup = incarnation.setup
    if setup is None or not gradients:
        return
    if incarnation.undecided is None:
        incarnation.undecided = {
            _key(values): values
            for values in setup.values(Phase.SETUP)
            if values.slot.startswith("param:") and _is_open(values, context)
        }
    after = {_key(values): values for values in step_view.values(Phase.PARAMS)}
    for key, values in [*incarnation.undecided.items()]:
        gradient, latest = gradients.get(key), after.get(key)
        if gradient is None or latest is None or gradient.source != "unknown":
            continue
        if gradient.is_constant:
            continue
        del incarnation.undecided[key]
        groups = [
            g for g in clusters(gradient) if _is_unlike(g, values, gradient, latest, step_view)
        ]
        if groups:
            yield _candidate(setup, values, groups)
    if not incarnation.undecided:
        incarnation.setup = None


def _key(values: SlotValues) -> tuple[str, int, str]:
    return values.call.path, values.call.ordinal, values.slot.partition(":")[2]


def _is_open(values: SlotValues, context: CheckContext) -> bool:
    """True for a plain parameter that differs between ranks and of which no layout speaks."""
    if values.source != "unknown" or values.is_constant or values.agree(values.ranks) is not False:
        return False
    return context.layouts.same(values) is None


def _is_unlike(
    group: Array, values: SlotValues, gradient: SlotValues, latest: SlotValues, step_view: StepView
) -> bool:
    """True where the ranks of one gradient hold other weights, before and after the step, and
    were not handed the same."""
    if values.agree(group) is not False or latest.agree(group) is not False:
        return False
    if (values.counts[values.at(group)] != gradient.counts[gradient.at(group)]).any():
        return False
    return any(
        value.agree(group) is False
        for call in step_view.named(values.call.path)
        if call.phase in (Phase.FORWARD, Phase.BACKWARD)
        for value in call.inputs
    )


def _candidate(setup: StepView, values: SlotValues, groups: list[Array]) -> Candidate:
    blamed = np.concatenate([minority(g, values.hashes[values.at(g)]) for g in groups])
    members = np.unique(np.concatenate(groups))
    is_resolved = len(blamed) < len(members)

    def evidence() -> dict[str, Any]:
        found: dict[str, Any] = {"layout": "inferred", "values": differing_sides(values, groups)}
        return found if is_resolved else found | {"rank_resolution": "none"}

    return candidate_of(
        setup,
        values,
        Kind.REPLICA,
        blamed,
        f"{ranks_named(blamed.tolist())} begin{'s' if len(blamed) == 1 else ''} with other "
        f"weights{' than the other replicas' if is_resolved else ''}, though the gradient is "
        f"reduced over {ranks_named(members.tolist())} ({sides_text(values, groups[0])})",
        evidence=evidence,
        priority=1,
        members=members,
    )
