"""Weights that should be one and are not: of replicas, and of two modules that are tied.

**Other weights.** Plain parameters that differ at setup may be shards. They are not where the first
gradient that is no constant is equal on these ranks though their module was handed different values
(the first of an adapter is zero where its other half begins as zero): only a reduction does that,
and what is reduced belongs to replicas. Weights made equal between setup and the optimizer step (a
broadcast after a first forward) are no fault.

**Lost ties.** A parameter that two modules share is in the trace once. Where the weights of an
embedding and of another module begin bitwise equal and step with gradients of their own, a tie was
lost: `parallelize_module` and a copy per module make two parameters of one. So are copies on two
stages of a pipeline whose gradients nobody sums. Copies of whole models (a teacher, a critic) hold
two embeddings and are left alone. Plain weights of one rank may be copied on purpose: a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import differing_sides, minority, sides, sides_text
from rankscope.diagnosis.evidence.replicas import clusters
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named

# ---- other weights -------------------------------------------------------------------------------


def other_weights(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every parameter that differed at setup though its gradient does not."""
    setup = step_view.life.setup
    if setup is None:
        return
    for values, gradient, latest in step_view.decided_starts.values():
        groups = [
            g for g in clusters(gradient) if _is_unlike(g, values, gradient, latest, step_view)
        ]
        if groups:
            yield _other_candidate(setup, values, groups)


def _is_unlike(
    group: Array, values: SlotValues, gradient: SlotValues, latest: SlotValues, step_view: StepView
) -> bool:
    """True where ranks of one gradient hold unlike weights before and after, and unlike inputs."""
    if values.agree(group) is not False or latest.agree(group) is not False:
        return False
    if (values.counts[values.at(group)] != gradient.counts[gradient.at(group)]).any():
        return False
    return any(value.agree(group) is False for value in step_view.handed(values.call.path))


def _other_candidate(setup: JudgedStep, values: SlotValues, groups: list[Array]) -> Candidate:
    blamed = np.concatenate([minority(g, values.hashes[values.at(g)]) for g in groups])
    members = np.unique(np.concatenate(groups))
    is_resolved = len(blamed) < len(members)
    return setup.candidate(
        values,
        Kind.REPLICA,
        blamed,
        f"{ranks_named(blamed)} begin{'s' if len(blamed) == 1 else ''} with other "
        f"weights{' than the other replicas' if is_resolved else ''}, though the gradient is "
        f"reduced over {ranks_named(members)} ({sides_text(values, groups[0])})",
        evidence=lambda: {
            "layout": "inferred",
            "values": differing_sides(values, groups),
            **({} if is_resolved else {"rank_resolution": "none"}),
        },
        priority=1,
        members=members,
    )


# ---- ties that were lost -------------------------------------------------------------------------

_TIE_ADVICE = (
    "Tie them again behind parallelize_module or fully_shard (head.weight = embedding.weight), "
    "before the optimizer is made. If one was only initialised from the other, this is no fault."
)
_STAGES_ADVICE = (
    "Sum the gradients of the two over the ranks that hold them, before the optimizer steps. "
    "If one was only initialised from the other, this is no fault."
)


def lost_ties(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every weight equal to an embedding's that trains apart."""
    incarnation = step_view.life
    setup = incarnation.setup
    if setup is None or incarnation.undecided is not None:
        return
    gradients = {values.parameter: values for values in step_view.values(Phase.GRADS)}
    for embedding, other in _equal_pairs(setup):
        own, its = gradients.get(embedding.parameter), gradients.get(other.parameter)
        if own is None or its is None:
            continue
        step_view.context.coverage.applied(own, its)
        if not np.isin(own.hashes, its.hashes).any():
            yield _tie_candidate(setup, embedding, other)


def _equal_pairs(setup: StepView) -> Iterator[tuple[SlotValues, SlotValues]]:
    """Yield the weights of embeddings with those of other modules that hold the same."""
    embeddings: list[SlotValues] = []
    others: dict[int, list[SlotValues]] = {}
    for values in setup.parameters(Phase.SETUP):
        if values.is_constant or not values.is_known.all():
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
    is_apart = not np.isin(embedding.ranks, other.ranks).any()
    hashes = np.unique(np.concatenate([embedding.hashes, other.hashes]))
    counts = np.unique(np.concatenate([embedding.counts, other.counts]))
    return is_apart and len(hashes) == len(counts) == 1


def _tie_candidate(setup: JudgedStep, embedding: SlotValues, other: SlotValues) -> Candidate:
    first = ".".join(embedding.parameter)
    ranks = np.union1d(embedding.ranks, other.ranks)
    is_beside = np.array_equal(embedding.ranks, other.ranks)
    is_fault = other.source == "dtensor" or not is_beside
    return setup.candidate(
        other,
        Kind.STRUCTURE,
        ranks,
        f"is initialised with the values of {first}, but is another parameter: each steps with a "
        f"gradient of its own, so the two are not tied",
        advice=_TIE_ADVICE if is_beside else _STAGES_ADVICE,
        severity=Severity.FAULT if is_fault else Severity.WARNING,
        evidence=lambda: {"tied_to": first, "values": sides(other, other.ranks)},
        priority=1,
        members=other.ranks,
    )
