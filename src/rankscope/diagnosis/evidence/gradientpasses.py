"""Gradients as optimizers took them, beside what the backward passes before had left.

A pass is recorded only where it tells something (docs/how-it-works/values.md): without a record on
a rank it left what the optimizer took (AS_LEFT says so), or is unknown. Sketches are linear, so
they show what was taken: the sum of what passes left, or the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped
from rankscope.record.value import ValueFlag

_FOREIGN: Final = int(ValueFlag.UNHELD | ValueFlag.SKIPPED)
"""Nobody stepped with such a gradient, or nobody knows who did."""
_RESTARTED: Final = int(ValueFlag.RESTARTED)
_NOTHING: Final = 1e-5
"""Beside the longest: what is shorter says nothing."""
_FEWEST_EQUATIONS: Final = 4
_WORST: Final = 1e-3
"""Smallest singular value by the largest: what is more alike cannot be told apart."""
_CLOSER: Final = 0.6
"""Of how far gradients lay apart when backward had left them; one that only some ranks reduced
comes no closer than that."""
_NONE: Final = 0.02
"""A factor that is smaller beside the largest counts as 0."""


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
        wiped = (values for values, after in pairs if (after.flags & _RESTARTED).any())
        return (*wiped, self.passes[-1])


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
            for number, (share, remainder) in enumerate(zip(self.shared, self.own))
            if self._is_none(share) and (remainder is None or self._is_none(remainder))
        )

    @property
    def is_reduced_early(self) -> bool:
        """True where one worth was averaged over the ranks and a later one added afterwards."""
        has_rest = [factor is not None and not self._is_none(factor) for factor in self.own]
        factors = zip(self.shared, self.own)
        is_reduced = [
            factor is not None and self._is_none(factor) and not self._is_none(share)
            for share, factor in factors
        ]
        return True in is_reduced and any(has_rest[is_reduced.index(True) :])

    def _is_none(self, factor: float) -> bool:
        largest = max(abs(number) for number in (*self.shared, *filter(None, self.own)))
        return abs(factor) <= _NONE * largest


def taken_gradients(step_view: StepView) -> Iterator[list[TakenGradient]]:
    """Yield the gradients of each optimizer step for which a pass is recorded."""
    recorded = (values for call in step_view.left_by_passes for values in call.slots.values())
    left_at = grouped(((values.call.path, values.slot), values) for values in recorded)
    if not left_at:
        return
    before: dict[tuple[str, str], SlotValues] = {}
    events = grouped((id(v.call.top), v) for v in step_view.gradients())
    for optimizer_step in sorted(events.values(), key=lambda event: event[0].call.top.ordinal):
        gradients = []
        for values in optimizer_step:
            place = (values.call.path, values.slot)
            earlier, before[place] = before.get(place), values
            if (values.flags & _FOREIGN).any():
                continue
            passes = []
            for remains in left_at.get(place, ()):
                rank = remains.ranks[:1]
                now = remains.call.times(rank)[0]
                is_before = rank[0] in values.ranks and now <= values.call.times(rank)[0]
                is_first = earlier is None or rank[0] not in earlier.ranks
                if is_before and (is_first or (earlier and now > earlier.call.times(rank)[0])):
                    passes.append(remains)
            if passes:
                passes.sort(key=lambda values: values.call.ordinal)
                gradients.append(TakenGradient(values, tuple(passes)))
        if gradients:
            yield gradients


def gathered_apart(event: Sequence[TakenGradient]) -> list[TakenGradient]:
    """Return gradients of one optimizer step that were wiped equally often on all their ranks."""
    groups: dict[tuple[int, bytes], list[TakenGradient]] = {}
    for gradient in event:
        worths, ranks = gradient.worths, gradient.values.ranks
        parts = (gradient.values, *worths)
        if len(worths) > 1 and all(
            np.array_equal(values.ranks, ranks)
            and values.are_known(ranks)
            and values.is_finite(ranks)
            for values in parts
        ):
            groups.setdefault((len(worths), ranks.tobytes()), []).append(gradient)
    return max(groups.values(), key=len, default=[])


def mixture_of(gradients: Sequence[TakenGradient], lines: Sequence[Array]) -> Mixture | None:
    """Return what the gradients of `gathered_apart` are made of; None where that is not known.
    `lines` are ranks that may have averaged."""
    values, count = gradients[0].values, len(gradients[0].worths)
    ranks = values.ranks
    # [ranks, numbers] each: the sketches of all gradients side by side
    columns = [[g.values.column("sketch"), *(w.column("sketch") for w in g.worths)]
               for g in gradients]  # fmt: skip
    total, *worths = (np.concatenate(parts, axis=1) for parts in zip(*columns))
    allowed = 4 * rounding_of(values.dtype)
    factors = _solved(worths, total, allowed)
    if factors is not None:
        return Mixture(tuple(factors), tuple(factors))
    if len(ranks) < 2 or any(gradient.values.source == "dtensor" for gradient in gradients):
        return None
    for groups in ([ranks], [line for line in lines if np.isin(line, ranks).all()]):
        if sorted(rank for group in groups for rank in group.tolist()) != ranks.tolist():
            continue
        means = [np.empty_like(worth) for worth in worths]
        for worth, mean in zip(worths, means):
            for group in groups:
                rows = np.searchsorted(ranks, group)
                mean[rows] = worth[rows].mean(axis=0)
        rests = [worth - mean for worth, mean in zip(worths, means)]
        factors = _solved([*means, *rests], total, allowed)
        if factors is not None:
            longest = max(float(np.linalg.norm(worth)) for worth in worths)
            lengths = [float(np.linalg.norm(remainder)) for remainder in rests]
            pairs = zip(factors[count:], lengths)
            by_rank = tuple(f if length > _NOTHING * longest else None for f, length in pairs)
            return Mixture(tuple(factors[:count]), by_rank)
    return None


def reduced_and_changed(events: Iterable[list[TakenGradient]]) -> Iterator[SlotValues]:
    """Yield gradients that differ on their ranks but lie much closer together than what the passes
    left there, and are multiples of that on none: something reduced them, and something else
    changed them. Asked of all gradients of an optimizer step, an event, as one vector."""
    for event in events:
        families: dict[bytes, list[TakenGradient]] = {}
        for gradient in event:
            values, left = gradient.values, gradient.passes[-1]
            ranks = values.ranks
            if len(ranks) > 1 and all(
                np.array_equal(part.ranks, ranks)
                and part.are_known(ranks)
                and part.is_finite(ranks)
                and part.source == "unknown"
                for part in (values, left)
            ):
                families.setdefault(ranks.tobytes(), []).append(gradient)
        for gradients in families.values():
            unlike = [g for g in gradients if g.values.agree(g.values.ranks) is False]
            # what several ranks hold and several others do not was reduced in groups of them
            if not unlike or any(_groups_alike(g.values) > 1 for g in unlike):
                continue
            taken, left_behind = (
                np.concatenate([part.column("sketch") for part in parts], axis=1)
                for parts in ([g.values for g in unlike], [g.passes[-1] for g in unlike])
            )
            allowed = 4 * rounding_of(unlike[0].values.dtype)
            are_own = _are_multiples(taken, left_behind, allowed)
            if not are_own.any() and _spread(taken) <= _CLOSER * _spread(left_behind):
                yield from (gradient.values for gradient in unlike)


def _groups_alike(values: SlotValues) -> int:
    counts = np.unique(values.hashes, return_counts=True)[1]
    return int((counts > 1).sum())


def _are_multiples(vectors: Array, of: Array, allowed: float) -> Array:
    squares = np.maximum((of**2).sum(axis=1), np.finfo(np.float64).tiny)
    factors = (vectors * of).sum(axis=1) / squares
    rests = np.linalg.norm(vectors - factors[:, None] * of, axis=1)
    is_multiple: Array = rests <= allowed * np.linalg.norm(vectors, axis=1)
    return is_multiple


def _spread(vectors: Array) -> float:
    """Return how far vectors lie from their mean, beside their length."""
    length = float(np.linalg.norm(vectors))
    return float(np.linalg.norm(vectors - vectors.mean(axis=0))) / length if length else 0.0


def _solved(columns: Sequence[Array], total: Array, allowed: float) -> list[float] | None:
    """Return the factors with which these add up to `taken`; None where none do, or several."""
    sizes = np.array([np.linalg.norm(column) for column in columns])
    used = np.flatnonzero(sizes > _NOTHING * sizes.max(initial=0.0))
    size = float(np.linalg.norm(total))
    if not len(used) or not size or total.size < _FEWEST_EQUATIONS * len(used):
        return None
    matrix = np.stack([columns[n].reshape(-1) / sizes[n] for n in used.tolist()], axis=1)
    factors, _, _, singular = np.linalg.lstsq(matrix, total.reshape(-1), rcond=None)
    is_apart = singular[-1] >= _WORST * singular[0]
    if not is_apart or not np.linalg.norm(matrix @ factors - total.reshape(-1)) <= allowed * size:
        return None
    solution = np.zeros(len(columns))
    solution[used] = factors / sizes[used]
    return [float(factor) for factor in solution]
