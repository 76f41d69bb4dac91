"""Which fault came first: rank-local order joined with what ranks did together.

On one rank everything has an order. Between ranks there is only what joins them: a collective has
not ended anywhere before every member has come, a message is not there before it was sent. So a
fault reaches a later one where a chain of these leads from it to there; what no fault reaches is an
origin. Faults that reach each other are one (two swapped collectives). Clocks of different ranks
are never compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.diagnosis.evidence.stepview import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """What was before it on any of `givers` is before what comes after it on all of `takers`."""

    givers: Array
    begins: Array
    """Per sender, ns on its own clock."""
    takers: Array
    ends: Array
    """Per receiver, ns on its own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlace:
    """A fault on some ranks, and when on each."""

    ranks: Array
    times_ns: Array


@dataclass(slots=True, kw_only=True)
class CauseOrder:
    """Which faults are origins."""

    origin_of: list[int | None]
    """Per place the origin that reaches it; None for origins."""
    unordered: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of origins without a common rank or a chain between them."""


def _reached_from(place: FaultPlace, joins: Sequence[Join], size: int) -> Array:
    """Return [size] per rank the first moment that a fault can have touched."""
    reached = np.full(size, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(reached, place.ranks, place.times_ns)
    while True:
        before = reached.copy()
        for join in joins:
            if (reached[join.givers] <= join.begins).any():
                np.minimum.at(reached, join.takers, join.ends)
        if (before == reached).all():
            return reached


def _limits_of(place: FaultPlace, joins: Sequence[Join], size: int) -> Array:
    """Return [size] per rank the moment before which a fault can have touched the place."""
    limit = np.full(size, np.iinfo(np.int64).min, np.int64)
    np.maximum.at(limit, place.ranks, place.times_ns)
    while True:
        before = limit.copy()
        for join in reversed(joins):
            if (join.ends < limit[join.takers]).any():
                np.maximum.at(limit, join.givers, join.begins + 1)
        if (before == limit).all():
            return limit


def sort_causes(places: Sequence[FaultPlace], joins: Sequence[Join]) -> CauseOrder:
    """Return which of these faults are origins, and which origin reaches each other one.

    Args:
        places: the faults, in any order.
        joins: in any order (near the order of time is faster).
    """
    size = 1 + max((int(p.ranks.max()) for p in places if len(p.ranks)), default=0)
    size = max(size, *(1 + int(max(j.givers.max(), j.takers.max())) for j in joins), 0)
    starts = [int(p.times_ns.min()) if len(p.times_ns) else 0 for p in places]
    origin_of: list[int | None] = [None] * len(places)
    left = sorted(range(len(places)), key=starts.__getitem__)
    origins: list[int] = []
    while left:
        first = _minimal(left, places, joins, size)
        reached = _reached_from(places[first], joins, size)
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
        origins.append(first)
    unordered = [
        (one, other)
        for one, other in itertools.combinations(origins, 2)
        if not np.isin(places[one].ranks, places[other].ranks).any()
    ]
    return CauseOrder(origin_of=origin_of, unordered=unordered)


def _minimal(
    left: Sequence[int], places: Sequence[FaultPlace], joins: Sequence[Join], size: int
) -> int:
    """Return one that no other reaches: begin with the first by clock, go back to its causes."""
    earliest = left[0]
    seen = {earliest}
    while True:
        limit = _limits_of(places[earliest], joins, size)
        for index in left:
            one = places[index]
            is_before = index not in seen and (one.times_ns < limit[one.ranks]).any()
            if is_before and not _is_mutual(one, places[earliest]):
                earliest = index
                seen.add(index)
                break
        else:
            return earliest


def _is_before_locally(one: FaultPlace, other: FaultPlace) -> bool:
    shared, own, others = np.intersect1d(one.ranks, other.ranks, return_indices=True)
    return bool(len(shared) and (one.times_ns[own] < other.times_ns[others]).any())


def _is_mutual(one: FaultPlace, other: FaultPlace) -> bool:
    """True where each is before the other on some rank: they are one fault."""
    return _is_before_locally(one, other) and _is_before_locally(other, one)
