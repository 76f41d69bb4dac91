"""Ranks whose gradients are reduced train one model: they began with the same weights.

Plain parameters that differ at setup may be shards. They are none where the first gradient of one
is the same on these ranks though its module was handed different values there: only a reduction
makes that so, and what was reduced belongs to replicas. Weights that were made equal between setup
and the optimizer step (a broadcast after a first forward) are no fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, suspect_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import differing_sides, minority, sides_text
from rankscope.diagnosis.replicas import clusters
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.call import Phase
from rankscope.record.finding import Kind
from rankscope.record.ranklists import ranks_named

__all__ = ["other_weights"]

Array = NDArray[Any]


def other_weights(moment: StepView, scene: CheckContext) -> Iterator[Candidate]:
    """Yield a suspect for every parameter that differed at setup on ranks that share its
    gradient. Asked once in a life, of its first optimizer step."""
    life = scene.life(moment.incarnation)
    gradients = {_key(held): held for held in moment.values(Phase.GRADS)}
    if life.setup is None or not gradients:
        return
    setup, life.setup = life.setup, None
    after = {_key(held): held for held in moment.values(Phase.PARAMS)}
    for held in setup.values(Phase.SETUP):
        gradient, latest = gradients.get(_key(held)), after.get(_key(held))
        if not held.slot.startswith("param:") or gradient is None or latest is None:
            continue
        if not _is_open(held, scene) or gradient.source != "unknown" or gradient.is_constant:
            continue
        groups = [g for g in clusters(gradient) if _is_unlike(g, held, gradient, latest, moment)]
        if groups:
            yield _suspect(setup, scene, held, groups)


def _key(held: SlotValues) -> tuple[str, int, str]:
    return held.call.path, held.call.ordinal, held.slot.partition(":")[2]


def _is_open(held: SlotValues, scene: CheckContext) -> bool:
    """True for a plain parameter that differs between ranks and of which no layout speaks."""
    if held.source != "unknown" or held.is_constant or held.agree(held.ranks) is not False:
        return False
    return scene.layouts.same(held) is None


def _is_unlike(
    group: Array, held: SlotValues, gradient: SlotValues, latest: SlotValues, moment: StepView
) -> bool:
    """True where the ranks of one gradient hold other weights, before and after the step, and
    were not handed the same."""
    if held.agree(group) is not False or latest.agree(group) is not False:
        return False
    if (held.counts[held.at(group)] != gradient.counts[gradient.at(group)]).any():
        return False
    return any(
        value.agree(group) is False
        for call in moment.named(held.call.path)
        if call.phase in (Phase.FORWARD, Phase.BACKWARD)
        for value in call.inputs
    )


def _suspect(
    setup: StepView, scene: CheckContext, held: SlotValues, groups: list[Array]
) -> Candidate:
    blamed = np.concatenate([minority(g, held.hashes[held.at(g)]) for g in groups])
    members = np.unique(np.concatenate(groups))
    is_told = len(blamed) < len(members)

    def evidence() -> dict[str, Any]:
        found: dict[str, Any] = {"layout": "inferred", "values": differing_sides(held, groups)}
        return found if is_told else found | {"rank_resolution": "none"}

    return suspect_at(
        setup,
        held.call,
        Kind.REPLICA,
        held.slot,
        blamed,
        members,
        scene.times(held, members),
        f"{ranks_named(blamed.tolist())} begin{'s' if len(blamed) == 1 else ''} with other "
        f"weights{' than the other replicas' if is_told else ''}, though the gradient is reduced "
        f"over {ranks_named(members.tolist())} ({sides_text(held, groups[0])})",
        evidence=evidence,
        priority=1,
    )
