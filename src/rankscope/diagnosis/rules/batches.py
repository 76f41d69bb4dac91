"""Ranks that were handed another batch, or another micro-batch, than they should work on.

**The same batch** on data-parallel ranks is a warning: nothing breaks. Compared are root inputs on
lines of ranks that DDP, FSDP or a layout file calls data. All that are no constants must be equal
in every micro-batch of the step: masks and positions are equal anyway.

**Different batches** on ranks that share a layer are a fault. Nobody says that ranks are
tensor-parallel where layers are cut by hand. But a module with other weights on each rank, whose
output is the sum of all ranks' parts, the same on all of them, adds up parts of one layer, and
parts of different batches belong to no batch.

**Mixed-up micro-batches.** A root input that is bitwise a root output of another rank in the step
came from there. Most inputs of a pipeline stage belong to its own micro-batch (or all to the one
before, where a stage made one call more); one that belongs to another, or to none, is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import rounding_of, sides, sides_text
from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, known_collectives
from rankscope.diagnosis.evidence.replicas import DDP, RootPlace
from rankscope.diagnosis.evidence.stepview import (
    Array,
    SlotValues,
    StepView,
    grouped,
    is_input,
    is_output,
    root_of,
)
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


# ---- stages of a pipeline ------------------------------------------------------------------------


_Place = tuple[str, str, int]
"""Path of a root, slot, rank."""
_Values = dict[int, tuple[SlotValues, int]]
"""{micro-batch: value and its hash}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """A root output that feeds a root input on another rank."""

    sender: int
    receiver: int
    sent: _Values
    taken: _Values


def stage_edges(step_view: StepView) -> list[StageLink]:
    """Return which stage feeds which in one step, each input with the output that fits it most."""
    edges = []
    for place, values, votes, outputs in _fits(step_view, Phase.FORWARD):
        best = min(votes, key=lambda p: (-votes[p], p))
        edges.append(StageLink(sender=best[2], receiver=place[2], sent=outputs[best], taken=values))
    return edges


def note_stages(step_view: JudgedStep) -> None:
    """Keep which root feeds which, so that these are not taken for replicas: of ranks that made the
    same output all. Integers do not count: equal token ids may be another batch by chance."""
    replicas = step_view.life.replicas
    feeds: set[tuple[RootPlace, RootPlace]] = set()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for (path, _, rank), values, votes, _ in _fits(step_view, phase):
            if not any(rounding_of(each.dtype) for each, _ in values.values()):
                continue
            most, receiver = max(votes.values()), (path, rank)
            for maker in (place for place, count in votes.items() if count == most):
                sender = (maker[0], maker[2])
                feeds.add((sender, receiver) if phase is Phase.FORWARD else (receiver, sender))
    replicas.note_stages(feeds)


def _fits(
    step_view: StepView, phase: Phase
) -> Iterator[tuple[_Place, _Values, Counter[_Place], dict[_Place, _Values]]]:
    """Yield root inputs made elsewhere, votes of micro-batches for each output, and all outputs."""
    outputs = _by_place(step_view, phase, is_output)
    made = ((number, place) for place, own in outputs.items() for _, number in own.values())
    makers = {number: set(places) for number, places in grouped(made).items()}
    for place, values in _by_place(step_view, phase, is_input).items():
        votes: Counter[_Place] = Counter()
        for _, number in values.values():
            places = makers.get(number, set())
            if all(maker[2] != place[2] for maker in places):
                votes.update(places)
        if votes:
            yield place, values, votes, outputs


def _by_place(
    step_view: StepView, phase: Phase, is_asked: Callable[[str, Phase], bool]
) -> dict[_Place, _Values]:
    places: dict[_Place, _Values] = {}
    for call in step_view.of(phase):
        if call.parent is not None or call.micro_batch is None:
            continue
        for slot, values in call.slots.items():
            if not is_asked(slot, phase) or values.dtype == "python" or values.is_constant:
                continue
            for rank, number, known in zip(
                values.ranks.tolist(), values.hashes.tolist(), values.is_known.tolist()
            ):
                if known:
                    place = (call.path, values.slot, rank)
                    places.setdefault(place, {})[call.micro_batch] = (values, number)
    return places


def mixed_up_micro_batches(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every stage input that is not what was sent for its micro-batch."""
    for edge in stage_edges(step_view):
        at = {number: micro for micro, (_, number) in edge.sent.items()}
        shifts = Counter(
            at[number] - micro for micro, (_, number) in edge.taken.items() if number in at
        )
        usual = min(shifts, key=lambda shift: (-shifts[shift], abs(shift)))
        for micro, (values, number) in sorted(edge.taken.items()):
            step_view.context.coverage.applied(values)
            sent = edge.sent.get(micro + usual)
            if sent is None or sent[1] == number:
                continue
            is_known = number in at
            if is_known or 2 * shifts[usual] >= len(edge.taken):
                yield _mixed_up_candidate(step_view, edge, values, at.get(number))


def _mixed_up_candidate(
    step_view: JudgedStep, edge: StageLink, values: SlotValues, other: int | None
) -> Candidate:
    micro = values.call.micro_batch
    detail = (
        f"what rank {edge.sender} made for micro-batch {other}"
        if other is not None
        else f"nothing that rank {edge.sender} made in this step"
    )
    ranks = np.array([edge.receiver], np.int64)
    return step_view.candidate(
        values,
        Kind.COLLECTIVE,
        ranks,
        f"in micro-batch {micro} rank {edge.receiver} works on {detail}",
        evidence=lambda: {
            "sender": edge.sender,
            "receiver": edge.receiver,
            "micro_batch": micro,
            "is_of_micro_batch": other,
        },
        priority=-1,
    )
