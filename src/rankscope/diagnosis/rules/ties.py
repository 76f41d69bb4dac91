"""Tied weights that became two parameters: an embedding and its head drift apart from then on.

A parameter that two modules share is one parameter, and the trace has it once. Where the weight of
an embedding and that of another module begin bitwise equal, and both step with gradients of their
own, they are a tie that was lost: `parallelize_module` and a copy per module make two parameters of
one. Copies of whole models (a teacher, a critic) hold two embeddings; those are left alone. Plain
weights may be copied on purpose, to train a head of its own: a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankscope.diagnosis.candidates import Candidate, suspect_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import sides
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.call import Phase
from rankscope.record.finding import Kind, Severity

__all__ = ["lost_ties"]

_ADVICE = (
    "Tie them again behind parallelize_module or fully_shard (head.weight = embedding.weight), "
    "before the optimizer is made. Weights copied to train a head of its own are no fault."
)


def lost_ties(moment: StepView, scene: CheckContext) -> Iterator[Candidate]:
    """Yield a suspect for every weight that began equal to an embedding's and trains apart. Asked
    once in a life, of its first optimizer step."""
    setup = scene.life(moment.incarnation).setup
    if setup is None:
        return
    gradients = {_key(held): held for held in moment.values(Phase.GRADS)}
    for embedding, other in _equal_pairs(setup):
        own, its = gradients.get(_key(embedding)), gradients.get(_key(other))
        if own is None or its is None:
            continue
        scene.ledger.applied(own)
        scene.ledger.applied(its)
        if own.ranks.tolist() == its.ranks.tolist() and (own.hashes != its.hashes).all():
            yield _suspect(setup, scene, embedding, other)


def _key(held: SlotValues) -> tuple[str, str]:
    return held.call.path, held.slot.partition(":")[2]


def _equal_pairs(setup: StepView) -> Iterator[tuple[SlotValues, SlotValues]]:
    """Yield the weights of embeddings with those of other modules that hold the same."""
    embeddings: list[SlotValues] = []
    others: dict[int, list[SlotValues]] = {}
    for held in setup.values(Phase.SETUP):
        if not held.slot.startswith("param:") or held.is_constant or not held.is_known.all():
            continue
        if "embedding" in held.call.node.class_name.lower():
            embeddings.append(held)
        else:
            others.setdefault(int(held.hashes[0]), []).append(held)
    for embedding in embeddings:
        for other in others.get(int(embedding.hashes[0]), ()):
            same = (embedding.ranks, embedding.hashes, embedding.counts)
            if all(map(np.array_equal, same, (other.ranks, other.hashes, other.counts))):
                yield embedding, other


def _suspect(
    setup: StepView, scene: CheckContext, embedding: SlotValues, other: SlotValues
) -> Candidate:
    first = f"{embedding.call.path}.{embedding.slot[6:]}"
    return suspect_at(
        setup,
        other.call,
        Kind.STRUCTURE,
        other.slot,
        other.ranks,
        other.ranks,
        scene.times(other, other.ranks),
        f"begins with the values of {first}, but is a parameter of its own: each steps with its "
        f"own gradient, as if they had never been tied",
        advice=_ADVICE,
        severity=Severity.FAULT if other.source == "dtensor" else Severity.WARNING,
        evidence=lambda: {"tied_to": first, "values": sides(other, other.ranks)},
        priority=1,
    )
