"""What a pipeline stage computes on in a micro-batch is what the stage before it sent for it.

A root input that is bitwise a root output of another rank in the step came from there. Most inputs
of a stage belong to its own micro-batch (or all to the one before, where a stage made one call
more); one that belongs to another, or to none, is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.replicas import RootPlace
from rankscope.diagnosis.evidence.stepview import SlotValues, StepView, grouped, is_input, is_output
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase

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
                yield _candidate(step_view, edge, values, at.get(number))


def _candidate(
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
