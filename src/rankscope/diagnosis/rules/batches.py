"""Ranks that were handed the batch of others, or another one than they should share.

**The same batch** on data-parallel ranks is a warning: nothing breaks. Compared are root inputs on
lines of ranks that DDP, FSDP or a layout file calls data. All that are no constants must be equal
in every micro-batch of the step: masks and positions are equal anyway.

**Different batches** on ranks that share a layer are a fault. Nobody says that ranks are
tensor-parallel where layers are cut by hand. But a module with other weights on each rank, whose
output is the sum of all ranks' parts, the same on all of them, adds up parts of one layer, and
parts of different batches belong to no batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import sides, sides_text
from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, known_collectives
from rankscope.diagnosis.evidence.replicas import DDP
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, root_of
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text

# ---- the same batch ------------------------------------------------------------------------------


def duplicate_batches(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield one warning for data-parallel ranks that had the same inputs."""
    if step_view.is_setup or step_view.mode.word != "train":
        return
    every = [h for call in step_view.roots for h in call.inputs if not h.is_constant]
    for source, groups in step_view.life.data_lines.items():
        inputs = _of_wrapped(step_view, every) if source == DDP else every
        same = [line for line in groups if _is_shared(inputs, line)]
        step_view.context.coverage.applied(*inputs)
        if same:
            yield _duplicate_candidate(step_view, inputs[0], source, same)
            return


def _of_wrapped(step_view: JudgedStep, inputs: list[SlotValues]) -> list[SlotValues]:
    """Return what wrapped roots were handed: a reference model beside them may share its batch."""
    wrapped = [call.path for call in step_view.calls if DDP in call.node.wrappers]
    roots = {root_of(path) for path in (*wrapped, *step_view.life.replicas.wrapped)}
    return [values for values in inputs if root_of(values.call.path) in roots]


def _is_shared(inputs: list[SlotValues], line: Array) -> bool:
    on_one_line = [values for values in inputs if (values.at(line) >= 0).all()]
    return bool(on_one_line) and all(values.agree(line) is True for values in on_one_line)


def _duplicate_candidate(
    step_view: JudgedStep, values: SlotValues, source: str, lines: list[Array]
) -> Candidate:
    ranks = np.unique(np.concatenate(lines))
    return step_view.candidate(
        values,
        Kind.DUPLICATE,
        ranks,
        f"{ranks_named(ranks)} are data-parallel ({source}) and were handed the same batch",
        severity=Severity.WARNING,
        once="duplicate batch",
        evidence=lambda: {"data_axis": source, "same_on": [ranks_text(line) for line in lines[:8]]},
    )


# ---- different batches ---------------------------------------------------------------------------

_ADVICE = (
    "Ranks that share a layer have to read the same rows: build the sampler from the data-parallel "
    "rank and size, not from the global ones."
)


def other_batches(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for the first root input that differs on ranks that sum up a layer."""
    if step_view.is_setup:
        return
    seen: set[tuple[int, ...]] = set()
    for issue in known_collectives(step_view):
        ranks = tuple(issue.ranks.tolist())
        if ranks in seen or not _sums_a_layer(issue, step_view):
            continue
        seen.add(ranks)
        given = _differing_input(step_view, issue)
        if given is not None:
            step_view.context.coverage.applied(given)
            yield _other_candidate(step_view, given, issue)


def _sums_a_layer(issue: IssuedCollective, step_view: JudgedStep) -> bool:
    """True where a module hands out a forward sum of what ranks made with weights of their own."""
    is_sum = issue.op == "all_reduce" and issue.facts.get("reduce") == "sum"
    if not is_sum or issue.facts.get("issuer") != "forward" or len(issue.ranks) < 2:
        return False
    replicas = step_view.life.replicas
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
    calls = (c for c in step_view.roots if c.micro_batch == issue.call.micro_batch)
    given = (values for call in calls for values in call.inputs)
    return next((values for values in given if values.agree(issue.ranks) is False), None)


def _other_candidate(
    step_view: JudgedStep, given: SlotValues, issue: IssuedCollective
) -> Candidate:
    ranks = issue.ranks
    return step_view.candidate(
        given,
        Kind.REPLICA,
        ranks,
        f"{ranks_named(ranks)} were handed different batches, and add up their parts of "
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
