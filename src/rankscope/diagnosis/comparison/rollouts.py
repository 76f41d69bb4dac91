"""Forwards of the same tokens that two runs made in other ways: a training step beside a forward
without gradients, one call of a whole sequence beside calls of a part and then of single tokens
(a rollout with a cache).

A token's part of a sketch is the sketch of that token alone, times the factor of its position over
that of position 0: factors of dims are independent. So calls of one token each add up to the sketch
of the sequence; of calls with several tokens behind the first one they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.assembly.combine import CombinationPlan, apply_plan
from rankscope.diagnosis.comparison.alignment import whole_shape
from rankscope.diagnosis.comparison.lostranks import LostRanks
from rankscope.diagnosis.comparison.wholevalues import Wholes, WholeValues, combined_row
from rankscope.diagnosis.replicas import Layouts
from rankscope.diagnosis.stepview import Array, SlotValues, StepView
from rankscope.record.sketchfactors import factors

_TOKENS_DIM = 1


def token_counts(step_view: StepView) -> list[int]:
    """Return the tokens of a sample in every root call, as the root's inputs tell; [] where they
    have no dim for them."""
    found: dict[int, int] = {}
    for call in step_view.roots:
        for values in call.inputs:
            shape = whole_shape(values)
            if call.path == "" and len(shape) > _TOKENS_DIM:
                found.setdefault(call.micro_batch or 0, shape[_TOKENS_DIM])
    return [found[micro_batch] for micro_batch in sorted(found)]


class TokenWholes(WholeValues):
    """Composes what the calls of one rollout hold, which were given so many tokens each."""

    def __init__(self, layouts: Layouts, lost: LostRanks, tokens: Sequence[int]) -> None:
        super().__init__(layouts, lost)
        self._tokens = tokens

    def of_all(
        self, by_call: Mapping[int, SlotValues], places: Array | None
    ) -> dict[int, Wholes | str]:
        """Return the wholes of all calls together, as those of call 0."""
        if set(by_call) != set(range(len(self._tokens))):
            return {0: "not in every call of the rollout"}
        calls = [by_call[index] for index in range(len(self._tokens))]
        shapes = [whole_shape(values) for values in calls]
        rest = {shape[:_TOKENS_DIM] + shape[_TOKENS_DIM + 1 :] for shape in shapes}
        counts = [shape[_TOKENS_DIM : _TOKENS_DIM + 1] for shape in shapes]
        if len(rest) != 1 or counts != [(count,) for count in self._tokens]:
            return {0: "no value of each token in every call of the rollout"}
        made: list[Wholes] = []
        for values in calls:
            own = self.of(values, places)
            if isinstance(own, str):
                return {0: own}
            made.append(own)
        return {0: self._joined(made)}

    def _joined(self, calls: list[Wholes]) -> Wholes | str:
        first = calls[0]
        for other in calls[1:]:
            same_places = np.array_equal(other.places, first.places)
            if not same_places or not all(map(np.array_equal, other.members, first.members)):
                return "ranks hold other values in some calls of the rollout"
        if any(count > 1 for count in self._tokens[1:]):
            return "several tokens at once behind the first call of the rollout"
        scales = [_scale(sum(self._tokens[:index])) for index in range(len(calls))]
        plan = CombinationPlan(
            ranks=tuple(range(len(calls))),
            index=np.arange(len(calls))[:, None],
            is_partial=False,
            summands=1,
            divisor=1.0,
            has_offsets=True,
        )
        rows, samples = [], []
        for index in range(len(first)):
            parts = np.concatenate([each.rows[[index]] for each in calls])
            parts["sketch"] *= np.array(scales)
            rows.append(combined_row(apply_plan(plan, parts), first.rows.dtype)[None])
            kept = [each.samples[index] for each in calls]
            known = [own * scale for own, scale in zip(kept, scales) if own is not None]
            is_whole = len(known) == len(calls) and len({len(each) for each in known}) == 1
            samples.append(np.sum(known, axis=0) if is_whole else None)
        return Wholes(
            rows=np.concatenate(rows),
            is_hashed=np.zeros(len(first), bool),
            places=first.places,
            members=first.members,
            samples=samples,
            is_described=first.is_described,
            reason=next((each.reason for each in calls if each.reason), ""),
        )


def _scale(start: int) -> Array:
    """Return [K] the factors of a position over those of position 0."""
    own = factors(_TOKENS_DIM, ((start, start + 1),))[:, 0].astype(np.float64)
    first = factors(_TOKENS_DIM, ((0, 1),))[:, 0].astype(np.float64)
    return own / first if start else np.ones(len(own))
