"""How far values lie apart, from their digests alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.evidence.stepview import Array, SlotValues
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.statistics import NONFINITE, numbers_with_first
from rankscope.tree.jsontext import statistic

ROUNDING: Final = {
    "float64": 1e-13,
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 8e-3,
    "complex64": 1e-5,
    "complex128": 1e-13,
}
"""Relative L2 distance below which values that replicas compute each for itself count as equal:
kernels that add in another order, on accelerators of another make. Anything else is compared by its
hash."""
_MOST_SIDES: Final = 8
_MOST_GROUPS: Final = 4
_FINE: Final = 64
"""A bound or a count is a multiple of one part in so many."""
_FAR: Final = 1e6
"""Parameters that were initialised do not lie as far apart as that, nor do trained ones."""


def rounding_of(dtype: str) -> float:
    """Return the tolerance of a dtype; 0 for integers and what has none."""
    return ROUNDING.get(dtype, 0.0)


def distance(values: SlotValues, places: Array) -> float:
    """Return the largest relative L2 distance of these values from the first, by their sketches;
    inf where they differ in what is not finite."""
    special = ("count", *NONFINITE)
    if any((values.column(n)[places] != values.column(n)[places[0]]).any() for n in special):
        return float("inf")
    sketches, norms = values.column("sketch")[places], values.column("l2")[places]
    largest = np.sqrt(np.mean((sketches - sketches[0]) ** 2, axis=1)).max()
    return float(largest / max(norms.max(), np.finfo(np.float64).tiny))


def told_distance(values: SlotValues, places: Array) -> float:
    """Return the same for people: no less than norms and means prove. Eight projections of two
    tensors may lie nearer than that, but what is within rounding has norms that are rounded too."""
    norms, means = values.column("l2")[places], values.column("mean")[places]
    offsets = abs(means - means[0]) * np.sqrt(values.counts[places])
    least = np.maximum(abs(norms - norms[0]), offsets).max()
    return max(distance(values, places), float(least / max(norms.max(), np.finfo(np.float64).tiny)))


def is_multiple(values: SlotValues, places: Array) -> bool:
    """True where all values of two elements or more are multiples of the longest, rounded."""
    if int(values.counts[places].min()) < 2:
        return False
    sketches, norms = values.column("sketch")[places], values.column("l2")[places]
    longest = sketches[int(norms.argmax())]
    square = float(longest @ longest)
    if not square:
        return False
    factors = sketches @ longest / square
    residuals = np.sqrt(np.mean((sketches - factors[:, None] * longest) ** 2, axis=1))
    allowed = 4 * rounding_of(values.dtype) * norms
    return bool(
        (residuals <= np.maximum(allowed, 1e-12 * norms.max())).all() and (factors != 0).all()
    )


def is_fine(values: SlotValues, place: int) -> bool:
    """True where what a rank holds has bounds that are no round numbers: counts, zeros and limits
    may be alike on ranks by chance."""
    fine = _FINE * np.array([values.column(name)[place] for name in ("min", "max")])
    slack = _FINE * rounding_of(values.dtype) * (1 + abs(fine))
    return bool(np.isfinite(fine).all() and (abs(fine - fine.round()) > slack).any())


def minority(ranks: Array, keys: Array) -> Array:
    """Return the ranks that hold something else than a strict majority; all where none is one."""
    is_of_most = keys == np.sort(keys)[len(keys) // 2]  # a strict majority has the middle
    is_outvoted = 2 * is_of_most.sum() > len(ranks) and not is_of_most.all()
    return ranks[~is_of_most] if is_outvoted else ranks


def groups_named(groups: Sequence[Array]) -> str:
    """Return `ranks 0-1 and ranks 2-3`."""
    if len(groups) > _MOST_GROUPS:
        return f"{len(groups)} groups of {ranks_named(np.concatenate(groups))}"
    return " and ".join(map(ranks_named, groups))


def sides(values: SlotValues, ranks: Array) -> list[dict[str, Any]]:
    """Return the different values among these ranks with their numbers, as JSON data."""
    places = values.at(ranks)
    places = places[places >= 0]
    hashes = values.hashes[places]
    firsts = np.sort(np.unique(hashes, return_index=True)[1])[:_MOST_SIDES]
    holders = (values.ranks[places[hashes == number]] for number in hashes[firsts])
    numbers = _numbers(values, places[firsts])
    return [{"ranks": ranks_text(r), **of_side} for r, of_side in zip(holders, numbers)]


def _numbers(values: SlotValues, places: Array) -> Iterator[dict[str, Any]]:
    names = numbers_with_first("mean", "std", "l2")
    columns = {n: values.column(n)[places].tolist() for n in (*names, *NONFINITE)}
    hashes = values.hashes[places].tolist()
    for at, is_known in enumerate(values.is_known[places].tolist()):
        if not is_known:
            yield {"digested": False}
            continue
        numbers: dict[str, Any] = {n: statistic(columns[n][at]) for n in names}
        numbers |= {n: columns[n][at] for n in NONFINITE if columns[n][at]}
        yield numbers | {"hash": f"{hashes[at]:016x}"}


def differing_sides(values: SlotValues, groups: list[Array]) -> list[dict[str, Any]]:
    """Return the sides of every group that differs, bounded."""
    return [side for group in groups[:4] for side in sides(values, group)]


def blamed_ranks(values: SlotValues, groups: list[Array]) -> tuple[Array, Array]:
    """Return the ranks that differ from a strict majority of their group, all ranks of a group
    without one, and the ranks of all groups."""
    members = np.concatenate(groups)
    hashes = np.split(values.hashes[values.at(members)], np.cumsum([*map(len, groups)])[:-1])
    return np.concatenate([*map(minority, groups, hashes)]), np.array(sorted({*members.tolist()}))


def inferred_evidence(
    values: SlotValues, ranks: Array, *, is_resolved: bool = False, **more: Any
) -> dict[str, Any]:
    """Return what a finding on unlike values rests on whose layout nothing describes; `is_resolved`
    where it tells the wrong ranks from the right ones."""
    unlike = {"layout": "inferred", "values": sides(values, ranks)}
    return {**unlike, **more, **({} if is_resolved else {"rank_resolution": "none"})}


def is_far_from(sizes: Array, usual: float) -> Array:
    """Return where sizes above 0 are so far from the usual one that nobody can have meant them."""
    is_far: Array = (sizes > 0) & ((sizes > _FAR * usual) | (sizes * _FAR < usual))
    return is_far


def sides_text(values: SlotValues, ranks: Array) -> str:
    """Return `rank 1: mean 0.031; ranks 0,2-3: mean 0.872`."""
    listed = sides(values, ranks)
    names = ("mean", "l2", "std", "max")
    differing = (n for n in names if len({_short(side.get(n)) for side in listed}) > 1)
    telling = next(differing, "mean")
    parts = []
    for side in listed[:4]:
        word = "rank" if side["ranks"].isdecimal() else "ranks"
        special = [f"{side[n]} {n}" for n in NONFINITE if n in side]
        numbers = ", ".join([f"{telling} {_short(side.get(telling))}", *special])
        parts.append(f"{word} {side['ranks']}: {numbers}")
    more = "; ..." if len(listed) > 4 else ""
    return "; ".join(parts) + more


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value}"


def is_within_rounding(values: SlotValues, groups: list[Array]) -> bool:
    """True where what differs does so by rounding alone."""
    allowed = rounding_of(values.dtype)
    return bool(allowed) and all(distance(values, values.at(g)) <= allowed for g in groups)
