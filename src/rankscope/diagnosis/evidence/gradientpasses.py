"""Gradients as optimizers took them, beside what the backward passes before had left.

A pass is recorded only where it tells something (docs/how-it-works/values.md): without a record on
a rank it left what the optimizer took (AS_LEFT says so), or is unknown. Sketches are linear, so
they show what was taken: the sum of what passes left, or the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag

_FOREIGN: Final = int(ValueFlag.UNHELD | ValueFlag.SKIPPED)
"""Nobody stepped with such a gradient, or nobody knows who did."""
_RESTARTED: Final = int(ValueFlag.RESTARTED)
_NOTHING: Final = 1e-5
"""Beside the longest: what is shorter says nothing."""
_FEWEST_EQUATIONS: Final = 4
"""For each unknown."""
_WORST: Final = 1e-3
"""Smallest singular value by the largest: what is more alike cannot be told apart."""
_NONE: Final = 0.02
"""A factor that is smaller beside the largest is none."""


@dataclass(frozen=True, slots=True)
class TakenGradient:
    """One gradient in one optimizer step."""

    values: SlotValues
    passes: tuple[SlotValues, ...]
    """What passes left since an optimizer took the one before, in order of time."""

    @property
    def worths(self) -> tuple[SlotValues, ...]:
        """What had been gathered each time it was wiped, and in the end."""
        pairs = zip(self.passes, self.passes[1:])
        return (*(one for one, then in pairs if (then.flags & _RESTARTED).any()), self.passes[-1])


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a gradient is made of, for every worth: so much of the mean over ranks, and so much of
    what the rank itself has beyond that."""

    shared: tuple[float, ...]
    own: tuple[float | None, ...]
    """None where all ranks had the same."""

    @property
    def lost(self) -> tuple[int, ...]:
        """Worths that nothing is left of, where something is of others."""
        return tuple(
            number
            for number, (one, other) in enumerate(zip(self.shared, self.own))
            if self._is_none(one) and (other is None or self._is_none(other))
        )

    @property
    def is_reduced_early(self) -> bool:
        """True where one worth was averaged over the ranks and a later one added afterwards."""
        reduced = [
            number
            for number, (one, other) in enumerate(zip(self.shared, self.own))
            if other is not None and self._is_none(other) and not self._is_none(one)
        ]
        return any(
            other is not None and not self._is_none(other) and number > min(reduced, default=number)
            for number, other in enumerate(self.own)
        )

    def _is_none(self, factor: float) -> bool:
        largest = max(abs(each) for each in (*self.shared, *filter(None, self.own)))
        return abs(factor) <= _NONE * largest


def taken_gradients(step_view: StepView) -> Iterator[list[TakenGradient]]:
    """Yield the gradients of each optimizer step of which a pass is recorded."""
    if not step_view.left_by_passes:
        return
    every = (values for call in step_view.left_by_passes for values in call.slots.values())
    left = grouped(((values.call.path, values.slot), values) for values in every)
    before: dict[tuple[str, str], SlotValues] = {}
    read = (values for call in step_view.of(Phase.GRADS) for values in call.slots.values())
    events = grouped((id(h.call.top), h) for h in read if h.slot.startswith("grad:"))
    for taken in sorted(events.values(), key=lambda event: event[0].call.top.ordinal):
        gradients = []
        for values in taken:
            place = (values.call.path, values.slot)
            earlier, before[place] = before.get(place), values
            left_here = left.get(place)
            if not left_here or (values.flags & _FOREIGN).any():
                continue
            passes = [each for each in left_here if _is_between(each, earlier, values)]
            if passes:
                passes.sort(key=lambda each: each.call.ordinal)
                gradients.append(TakenGradient(values, tuple(passes)))
        if gradients:
            yield gradients


def _is_between(left: SlotValues, earlier: SlotValues | None, taken: SlotValues) -> bool:
    rank = left.ranks[:1]
    now = left.call.times(rank)[0]
    if rank[0] not in taken.ranks or now > taken.call.times(rank)[0]:
        return False
    return (
        earlier is None or rank[0] not in earlier.ranks or bool(now > earlier.call.times(rank)[0])
    )


def gathered_apart(event: Sequence[TakenGradient]) -> list[TakenGradient]:
    """Return gradients of one optimizer step that were wiped equally often on all their ranks."""
    groups: dict[tuple[int, bytes], list[TakenGradient]] = {}
    for each in event:
        worths = each.worths
        if len(worths) < 2 or not _is_usable(each.values, each.values.ranks):
            continue
        ranks = each.values.ranks
        if all(np.array_equal(own.ranks, ranks) and _is_usable(own, ranks) for own in worths):
            groups.setdefault((len(worths), ranks.tobytes()), []).append(each)
    return max(groups.values(), key=len, default=[])


def _is_usable(values: SlotValues, ranks: Array) -> bool:
    return values.are_known(ranks) and values.is_finite(ranks)


def mixture_of(gradients: Sequence[TakenGradient], lines: Sequence[Array]) -> Mixture | None:
    """Return what the gradients of `gathered_apart` are made of; None where that is not known.
    `lines` are ranks that may have averaged."""
    values = gradients[0].values
    ranks = values.ranks
    taken = _stacked([each.values for each in gradients])
    count = len(gradients[0].worths)
    worths = [_stacked([each.worths[number] for each in gradients]) for number in range(count)]
    allowed = 4 * rounding_of(values.dtype)
    factors = _solved(worths, taken, allowed)
    if factors is not None:
        return Mixture(tuple(factors), tuple(factors))
    if len(ranks) < 2 or any(each.values.source == "dtensor" for each in gradients):
        return None
    for groups in ([ranks], [line for line in lines if np.isin(line, ranks).all()]):
        if sorted(rank for group in groups for rank in group.tolist()) != ranks.tolist():
            continue
        means = [_means(worth, ranks, groups) for worth in worths]
        rests = [worth - mean for worth, mean in zip(worths, means)]
        factors = _solved([*means, *rests], taken, allowed)
        if factors is not None:
            longest = max(float(np.linalg.norm(each)) for each in worths)
            is_there = [float(np.linalg.norm(rest)) > _NOTHING * longest for rest in rests]
            own = tuple(each if there else None for each, there in zip(factors[count:], is_there))
            return Mixture(tuple(factors[:count]), own)
    return None


def _stacked(values: Sequence[SlotValues]) -> Array:
    """Return [ranks, numbers]: the sketches side by side."""
    return np.concatenate([each.column("sketch") for each in values], axis=1)


def _means(worth: Array, ranks: Array, groups: Sequence[Array]) -> Array:
    made = np.empty_like(worth)
    for group in groups:
        rows = np.searchsorted(ranks, group)
        made[rows] = worth[rows].mean(axis=0)
    return made


def _solved(columns: Sequence[Array], taken: Array, allowed: float) -> list[float] | None:
    """Return the factors with which these add up to `taken`; None where none do, or several."""
    sizes = np.array([np.linalg.norm(each) for each in columns])
    used = np.flatnonzero(sizes > _NOTHING * sizes.max(initial=0.0))
    size = float(np.linalg.norm(taken))
    if not len(used) or not size or taken.size < _FEWEST_EQUATIONS * len(used):
        return None
    matrix = np.stack([columns[n].reshape(-1) / sizes[n] for n in used.tolist()], axis=1)
    factors, _, _, singular = np.linalg.lstsq(matrix, taken.reshape(-1), rcond=None)
    if singular[-1] < _WORST * singular[0]:
        return None
    if not np.linalg.norm(matrix @ factors - taken.reshape(-1)) <= allowed * size:
        return None
    found = np.zeros(len(columns))
    found[used] = factors / sizes[used]
    return [float(each) for each in found]
