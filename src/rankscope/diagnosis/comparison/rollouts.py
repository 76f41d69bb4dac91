"""Forwards of the same tokens that two runs made in other ways: a training step beside a forward
without gradients, one call of a whole sequence beside calls of a part and then of single tokens
(a rollout with a cache).

A token's part of a sketch is the sketch of that token alone, times the factor of its position over
that of position 0: factors of dims are independent. So calls of one token each add up to the sketch
of the sequence; of calls with several tokens behind the first one they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.assembly.combine import CombinationPlan, apply_plan
from rankscope.diagnosis.comparison.alignment import whole_shape
from rankscope.diagnosis.comparison.tracesides import StepKey, TraceSide
from rankscope.diagnosis.comparison.wholevalues import Wholes, WholeValues, combined_row
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView
from rankscope.record.call import Mode
from rankscope.record.sketchfactors import factors

_TOKENS_DIM = 1


@dataclass(frozen=True, slots=True)
class StepPair:
    """Steps that are compared with each other: one on each side, or calls that make one."""

    ref: tuple[StepKey, ...]
    test: tuple[StepKey, ...]

    @property
    def is_of_forwards(self) -> bool:
        """True where no more than forwards can be compared."""
        return self.ref != self.test


def paired_steps(ref: TraceSide, test: TraceSide) -> list[StepPair]:
    """Return which steps are compared: those of the same mode and number.

    Where there are none, or eval steps of one number worked on unlike many tokens, eval steps stand
    beside the steps of the other run in their order, several of them where these together have as
    many tokens.
    """
    common = [key for key in ref.steps if key in test.steps]
    evaluated = next((key for key in common if key[0] is Mode.EVAL), None)
    is_in_parts = evaluated is not None and _tokens(ref, evaluated) != _tokens(test, evaluated)
    if common and not is_in_parts:
        return [StepPair((key,), (key,)) for key in common]
    found = [StepPair((key,), (key,)) for key in common if key[0] is Mode.TRAIN]
    sides = [
        [key for key in side.steps if not found or key[0] is Mode.EVAL] for side in (ref, test)
    ]
    while all(sides):
        pair = _next_pair((ref, test), sides)
        if pair is None:
            break
        found.append(pair)
    return found


def _next_pair(traces: tuple[TraceSide, TraceSide], left: list[list[StepKey]]) -> StepPair | None:
    """Take steps off both lists that worked on as many tokens; None where none do."""
    taken: tuple[list[StepKey], list[StepKey]] = ([left[0].pop(0)], [left[1].pop(0)])
    counts = [_tokens(trace, own[0]) for trace, own in zip(traces, taken)]
    while counts[0] != counts[1]:
        if counts[0] is None or counts[1] is None:
            return None
        short = 0 if counts[0] < counts[1] else 1
        if not left[short] or left[short][0][0] is not Mode.EVAL:
            return None
        key = left[short].pop(0)
        more = _tokens(traces[short], key)
        if more is None or taken[short][0][0] is not Mode.EVAL:
            return None
        taken[short].append(key)
        counts[short] = (counts[short] or 0) + more
    is_alike = taken[0][0][0] is taken[1][0][0] and len(taken[0]) == len(taken[1]) == 1
    if is_alike and taken[0] != taken[1]:
        return None  # steps of one mode and other numbers are other steps
    return StepPair(tuple(taken[0]), tuple(taken[1]))


def _tokens(side: TraceSide, key: StepKey) -> int | None:
    return next(iter(token_counts(side.view((key,)))), None)


def wholes_of(side: TraceSide, keys: Sequence[StepKey], step_view: StepView) -> WholeValues:
    """Return what composes the values of steps that are read as one."""
    if len(keys) == 1:
        return side.wholes
    # each call is a step of its own: a proof of every one would cost more than it tells
    return TokenWholes(WholeValues(side.layouts, side.lost), token_counts(step_view))


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
    """Composes what consecutive calls hold of the tokens that they were given."""

    def __init__(self, one: WholeValues, tokens: Sequence[int]) -> None:
        """Compose calls of one rollout that were given so many tokens each; `one` composes a value
        of a single call."""
        self._one, self._tokens = one, tokens
        self._starts = [sum(tokens[:index]) for index in range(len(tokens))]

    def of(self, values: SlotValues, places: Array | None) -> Wholes | str:
        """Return the wholes of one call."""
        return self._one.of(values, places)

    def of_all(
        self, by_call: Mapping[int, SlotValues], places: Array | None
    ) -> dict[int, Wholes | str]:
        """Return the wholes of all calls together, as those of call 0."""
        if set(by_call) != set(range(len(self._tokens))):
            return {0: "not in every call of the rollout"}
        shapes = [whole_shape(by_call[index]) for index in range(len(self._tokens))]
        rest = {shape[:_TOKENS_DIM] + shape[_TOKENS_DIM + 1 :] for shape in shapes}
        if len(rest) != 1 or [shape[_TOKENS_DIM : _TOKENS_DIM + 1] for shape in shapes] != [
            (count,) for count in self._tokens
        ]:
            return {0: "no value of each token in every call of the rollout"}
        made: list[Wholes] = []
        for index in range(len(self._tokens)):
            own = self._one.of(by_call[index], places)
            if isinstance(own, str):
                return {0: own}
            made.append(own)
        return {0: self._joined(made)}

    def _joined(self, calls: list[Wholes]) -> Wholes | str:
        first = calls[0]
        if any(
            len(each) != len(first)
            or not np.array_equal(each.places, first.places)
            or any(not np.array_equal(a, b) for a, b in zip(each.members, first.members))
            for each in calls
        ):
            return "ranks hold other values in some calls of the rollout"
        if any(count > 1 for count in self._tokens[1:]):
            return "several tokens at once behind the first call of the rollout"
        scales = [_scale(start) for start in self._starts]
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
