"""Tied weights that became two parameters: an embedding and its head drift apart from then on.

A parameter that two modules share is one parameter, and the trace has it once. Where the weight of
an embedding and that of another module begin bitwise equal, and both step with gradients of their
own, they are a tie that was lost: `parallelize_module` and a copy per module make two parameters of
one. So are copies on two stages of a pipeline whose gradients nobody sums. Copies of whole models
(a teacher, a critic) hold two embeddings; those are left alone. Plain weights of one rank may be
copied on purpose, to train a head of its own: a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import sides
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase

__all__ = ["lost_ties"]

_ADVICE = (
    "Tie them again behind parallelize_module or fully_shard (head.weight = embedding.weight), "
    "before the optimizer is made. Weights copied to train a head of its own are no fault."
)
_STAGES_ADVICE = (
    "Sum the gradients of the two over the ranks that hold them, before the optimizer steps. "
    "Weights copied to train a head of its own are no fault."
)


def lost_ties(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every weight that began equal to an embedding's and trains apart. Asked
    once in an incarnation, of its first optimizer step."""
    incarnation = context.incarnation(step_view.incarnation)
    setup = incarnation.setup
    if setup is None or incarnation.undecided is not None:
        return
    gradients = {_key(values): values for values in step_view.values(Phase.GRADS)}
    for embedding, other in _equal_pairs(setup):
        own, its = gradients.get(_key(embedding)), gradients.get(_key(other))
        if own is None or its is None:
            continue
        context.coverage.applied(own)
        context.coverage.applied(its)
        if not np.isin(own.hashes, its.hashes).any():
            yield _candidate(setup, embedding, other)


def _key(values: SlotValues) -> tuple[str, str]:
    return values.call.path, values.slot.partition(":")[2]


def _equal_pairs(setup: StepView) -> Iterator[tuple[SlotValues, SlotValues]]:
    """Yield the weights of embeddings with those of other modules that hold the same."""
    embeddings: list[SlotValues] = []
    others: dict[int, list[SlotValues]] = {}
    for values in setup.values(Phase.SETUP):
        if not values.slot.startswith("param:") or values.is_constant or not values.is_known.all():
            continue
        if "embedding" in values.call.node.class_name.lower():
            embeddings.append(values)
        else:
            others.setdefault(int(values.hashes[0]), []).append(values)
    for embedding in embeddings:
        for other in others.get(int(embedding.hashes[0]), ()):
            same = (embedding.ranks, embedding.hashes, embedding.counts)
            is_beside = all(map(np.array_equal, same, (other.ranks, other.hashes, other.counts)))
            if is_beside or _is_on_other_ranks(embedding, other):
                yield embedding, other


def _is_on_other_ranks(embedding: SlotValues, other: SlotValues) -> bool:
    """True where ranks without the embedding hold all of it in the other module."""
    is_apart = not np.isin(embedding.ranks, other.ranks).any()
    hashes = np.unique(np.concatenate([embedding.hashes, other.hashes]))
    counts = np.unique(np.concatenate([embedding.counts, other.counts]))
    return is_apart and len(hashes) == len(counts) == 1


def _candidate(setup: StepView, embedding: SlotValues, other: SlotValues) -> Candidate:
    first = f"{embedding.call.path}.{embedding.slot[6:]}"
    ranks = np.union1d(embedding.ranks, other.ranks)
    is_beside = np.array_equal(embedding.ranks, other.ranks)
    is_fault = other.source == "dtensor" or not is_beside
    return candidate_of(
        setup,
        other,
        Kind.STRUCTURE,
        ranks,
        f"begins with the values of {first}, but is a parameter of its own: each steps with its "
        f"own gradient, as if they had never been tied",
        advice=_ADVICE if is_beside else _STAGES_ADVICE,
        severity=Severity.FAULT if is_fault else Severity.WARNING,
        evidence=lambda: {"tied_to": first, "values": sides(other, other.ranks)},
        priority=1,
        members=other.ranks,
    )
