"""Ranks that share one layer were handed different batches.

Nobody says that ranks are tensor-parallel where layers are cut by hand, and ranks with batches of
their own look data-parallel. But a module that holds other weights on each rank (a shard), and
whose output is the sum of all ranks' parts, the same bit for bit on all of them, adds up parts of
one layer. Parts that were computed from different batches belong to no batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.datapeers import root_calls
from rankscope.diagnosis.distances import sides, sides_text
from rankscope.diagnosis.issuedcollectives import IssuedCollective, known_collectives
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named

__all__ = ["other_batches"]

Array = NDArray[np.int64]
_ADVICE = (
    "Ranks that share a layer have to read the same rows: build the sampler from the data-parallel "
    "rank and size, not from the global ones."
)


def other_batches(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for the first root input that differs on ranks which sum parts of a
    layer.
    """
    if step_view.is_setup:
        return
    seen: set[tuple[int, ...]] = set()
    for issue in known_collectives(step_view):
        ranks = tuple(issue.ranks.tolist())
        if ranks in seen or not _sums_a_layer(issue, step_view, context):
            continue
        seen.add(ranks)
        given = _differing_input(step_view, issue)
        if given is not None:
            context.coverage.applied(given)
            yield _candidate(step_view, given, issue)


def _sums_a_layer(issue: IssuedCollective, step_view: StepView, context: CheckContext) -> bool:
    """True for a sum in forward of what ranks made with weights of their own: it is what the module
    hands out."""
    is_sum = issue.op == "all_reduce" and issue.facts.get("reduce") == "sum"
    if not is_sum or issue.facts.get("issuer") != "forward" or len(issue.ranks) < 2:
        return False
    replicas = context.incarnation(step_view.incarnation).replicas
    if not issue.call.path or not replicas.is_cut_between(issue.call.path, issue.ranks):
        return False
    made = issue.call.slots.get("output.0")
    if made is None or made.agree(issue.ranks) is not True or made.is_constant:
        return False
    return any(
        each.hashes[0] == made.hashes[0] and each.counts[0] == made.counts[0]
        for call in step_view.named(issue.call.path)
        if call.phase is Phase.FORWARD and call.micro_batch == issue.call.micro_batch
        for each in call.outputs
        if np.isin(issue.ranks, each.ranks).all()
    )


def _differing_input(step_view: StepView, issue: IssuedCollective) -> SlotValues | None:
    """Return the first tensor that a root was handed and that differs on these ranks."""
    for call in root_calls(step_view):
        if call.micro_batch != issue.call.micro_batch:
            continue
        for values in call.inputs:
            if values.agree(issue.ranks) is False:
                return values
    return None


def _candidate(step_view: StepView, given: SlotValues, issue: IssuedCollective) -> Candidate:
    ranks = issue.ranks
    return candidate_of(
        step_view,
        given,
        Kind.REPLICA,
        ranks,
        f"{ranks_named(ranks.tolist())} were handed different batches, and add up their parts of "
        f"one layer in {issue.call.path} ({sides_text(given, ranks)})",
        advice=_ADVICE,
        evidence=lambda: {
            "layout": "inferred",
            "values": sides(given, ranks),
            "summed_in": issue.call.path,
            "rank_resolution": "none",
        },
        priority=-1,
    )
