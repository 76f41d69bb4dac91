"""Which fault came first: rank-local order joined with what ranks did together.

On one rank everything has an order. Between ranks there is only what joins them: a collective has
not ended anywhere before every member has come, a message is not there before it was sent. So a
fault reaches a later one where a chain of these leads from it to there; what no fault reaches is an
origin. Faults that reach each other are one (two swapped collectives). Clocks of different ranks
are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rankscope.diagnosis.stepview import Array

_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Something several ranks did together: what was before it on any of `givers` is before what
    comes after it on all of `takers`."""

    givers: Array
    begins: Array
    """Per sender, ns on its own clock."""
    takers: Array
    ends: Array
    """Per receiver, ns on its own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlace:
    """Where a fault is: ranks, and when on each."""

    ranks: Array
    times_ns: Array


@dataclass(slots=True, kw_only=True)
class CauseOrder:
    """Who came first."""

    origin_of: list[int | None]
    """Per place the origin that reaches it; None for origins."""
    unordered: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of origins without a common rank or a chain between them."""


class _CausalReach:
    """From when on each rank is reached by a fault."""

    def __init__(self, joins: Sequence[Join], size: int) -> None:
        self._joins, self._size = joins, size

    def from_place(self, place: FaultPlace) -> Array:
        """Return per rank the first moment that the fault can have touched."""
        reached = np.full(self._size, _NEVER, np.int64)
        np.minimum.at(reached, place.ranks, place.times_ns)
        while True:
            before = reached.copy()
            for join in self._joins:
                if (reached[join.givers] <= join.begins).any():
                    np.minimum.at(reached, join.takers, join.ends)
            if (before == reached).all():
                return reached

    def to_place(self, place: FaultPlace) -> Array:
        """Return per rank the moment before which a fault can have touched the place."""
        limit = np.full(self._size, np.iinfo(np.int64).min, np.int64)
        np.maximum.at(limit, place.ranks, place.times_ns)
        while True:
            before = limit.copy()
            for join in reversed(self._joins):
                if (join.ends < limit[join.takers]).any():
                    np.maximum.at(limit, join.givers, join.begins + 1)
            if (before == limit).all():
                return limit


def sort_causes(places: Sequence[FaultPlace], joins: Sequence[Join]) -> CauseOrder:
    """Say which of these faults are origins, and which origin reaches each of the others.

    Args:
        places: the faults, in any order.
        joins: what ranks did together, in any order (near the order of time it is faster).
    """
    size = 1 + max((int(p.ranks.max()) for p in places if len(p.ranks)), default=0)
    size = max(size, *(1 + int(max(j.givers.max(), j.takers.max())) for j in joins), 0)
    reach = _CausalReach(joins, size)
    starts = [int(p.times_ns.min()) if len(p.times_ns) else 0 for p in places]
    origin_of: list[int | None] = [None] * len(places)
    left = sorted(range(len(places)), key=starts.__getitem__)
    origins: list[tuple[int, Array]] = []
    while left:
        first = _minimal(left, places, reach)
        reached = reach.from_place(places[first])
        still = []
        for index in left:
            if index == first:
                continue
            other = places[index]
            is_after = bool((reached[other.ranks] < other.times_ns).any())
            if is_after and not _is_mutual(places[first], other):
                origin_of[index] = first
            else:
                still.append(index)
        left = still
        origins.append((first, reached))
    unordered = [
        (one, other)
        for number, (one, _) in enumerate(origins)
        for other, _ in origins[number + 1 :]
        if not np.isin(places[one].ranks, places[other].ranks).any()
    ]
    return CauseOrder(origin_of=origin_of, unordered=unordered)


def _minimal(left: Sequence[int], places: Sequence[FaultPlace], reach: _CausalReach) -> int:
    """Return one that no other reaches: begin with the first by clock, go back to its causes."""
    found = left[0]
    seen = {found}
    while True:
        limit = reach.to_place(places[found])
        for index in left:
            one = places[index]
            is_before = index not in seen and (one.times_ns < limit[one.ranks]).any()
            if is_before and not _is_mutual(one, places[found]):
                found = index
                seen.add(index)
                break
        else:
            return found


def _is_before_locally(one: FaultPlace, other: FaultPlace) -> bool:
    shared, own, others = np.intersect1d(one.ranks, other.ranks, return_indices=True)
    return bool(len(shared) and (one.times_ns[own] < other.times_ns[others]).any())


def _is_mutual(one: FaultPlace, other: FaultPlace) -> bool:
    """True where each is before the other on some rank: they are one fault."""
    return _is_before_locally(one, other) and _is_before_locally(other, one)
