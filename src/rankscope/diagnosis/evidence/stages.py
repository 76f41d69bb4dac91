"""Which stage of a pipeline feeds which: a root input that is bitwise a root output of another rank
in the step came from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.replicas import RootPlace
from rankscope.diagnosis.evidence.stepview import SlotValues, StepView, grouped, is_input, is_output
from rankscope.record.phases import Phase

_Place = tuple[str, str, int]
"""Path of a root, slot, rank."""
_Values = dict[int, tuple[SlotValues, int]]


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
    for place, inputs, votes, outputs in _fits(step_view, Phase.FORWARD):
        best = min(votes, key=lambda maker: (-votes[maker], maker))
        edges.append(StageLink(sender=best[2], receiver=place[2], sent=outputs[best], taken=inputs))
    return edges


def stage_feeds(step_view: StepView) -> frozenset[tuple[RootPlace, RootPlace]]:
    """Return which root feeds which, so that these are not taken for replicas: of ranks that made
    the same output all. Integers do not count: equal token ids may be another batch by chance."""
    feeds: set[tuple[RootPlace, RootPlace]] = set()
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for (path, _, rank), inputs, votes, _ in _fits(step_view, phase):
            if not any(rounding_of(values.dtype) for values, _ in inputs.values()):
                continue
            for maker_path, _, maker_rank in (m for m in votes if votes[m] == max(votes.values())):
                feed = (maker_path, maker_rank), (path, rank)
                feeds.add(feed if phase is Phase.FORWARD else feed[::-1])
    return frozenset(feeds)


def _fits(
    step_view: StepView, phase: Phase
) -> Iterator[tuple[_Place, _Values, Counter[_Place], dict[_Place, _Values]]]:
    """Yield root inputs made elsewhere, votes of micro-batches for each output, and all outputs."""
    outputs = _by_place(step_view, phase, is_output)
    hashes = ((number, place) for place, by in outputs.items() for _, number in by.values())
    makers = {number: set(places) for number, places in grouped(hashes).items()}
    for place, inputs in _by_place(step_view, phase, is_input).items():
        votes: Counter[_Place] = Counter()
        for _, number in inputs.values():
            places = makers.get(number, set())
            if all(maker[2] != place[2] for maker in places):
                votes.update(places)
        if votes:
            yield place, inputs, votes, outputs


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
            for rank, number, is_known in zip(
                values.ranks.tolist(), values.hashes.tolist(), values.is_known.tolist()
            ):
                if is_known:
                    place = (call.path, values.slot, rank)
                    places.setdefault(place, {})[call.micro_batch] = (values, number)
    return places
