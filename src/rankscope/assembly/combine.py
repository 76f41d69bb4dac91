"""Global statistics of a tensor that no rank holds whole, from the digests of its shards.

A *plan* says which rows are pieces of the whole, which are replicas of each other and which are
summands of a partial; it depends on layout and shapes alone. Applying it to numbers is arithmetic:

    counts, extrema, sketches   add up (or the smallest, the largest)
    mean, second moment         Chan, Golub, LeVeque (1979): pairwise update, here of all at once
    L2 norm                     root of the sum of squares, scaled by the largest

For a 2x2 mesh ("dp", "tp") placed (Replicate(), Shard(0)) the plan is two pieces of two replicas:
[[rank 0, rank 2], [rank 1, rank 3]]. Replicas are compared by hash and taken once. Of a
Partial(sum) or Partial(avg) only mean and sketch, which are linear, are known before it is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.layout.placement import Mesh, Pieces, Placement, Ranges
from rankscope.record.combined import Combined
from rankscope.record.ranklists import ranks_named
from rankscope.record.statistics import STATISTICS, OverShards, finite_counts

__all__ = ["CombinationPlan", "Combined", "Holding", "apply_plan", "plan_pieces"]

PARTIAL_NOTE = "a partial is reduced later: only mean and sketch are linear"
NO_OFFSETS_NOTE = "no offsets were recorded: the sketches of its shards do not add up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds of the tensor."""

    rank: int
    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...] | None
    """Per dim the global indices, None where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinationPlan:
    """Which rows to add and which to compare."""

    ranks: tuple[int, ...]
    """Every rank of the mesh, in the order of the rows."""
    index: NDArray[np.int64]
    """[pieces, replicas] row numbers; replicas of a piece hold the same values."""
    summands: int
    """Pieces that add up to one element (product of the Partial axes), 1 without a partial."""
    divisor: float
    """What the sum of the summands is divided by (product of the Partial(avg) axes)."""
    has_offsets: bool
    """False where shards do not know their place: their sketches cannot be added."""


def plan_pieces(
    mesh: Mesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int],
    held: Sequence[Holding],
) -> CombinationPlan | str:
    """Return how the rows of `held` make up the global tensor, or why they do not.

    Args:
        mesh: the mesh the placements speak of.
        placements: one per mesh axis.
        global_shape: shape of the whole tensor.
        held: one entry per row, at most one per rank.
    """
    for placement in placements:
        if not placement.is_composable:
            return f"{placement} does not compose"
    row_of = {holding.rank: row for row, holding in enumerate(held)}
    if len(row_of) != len(held):
        return "a rank has several values here"
    missing = [rank for rank in mesh.ranks if rank not in row_of]
    if missing:
        return f"no value from {ranks_named(missing)}"
    outside = sorted(set(row_of) - set(mesh.ranks))
    if outside:
        return f"not in the mesh: {ranks_named(outside)}"
    rows = np.array([row_of[rank] for rank in mesh.ranks], np.int64).reshape(mesh.shape)
    of_kind = _axes_by_kind(placements)
    replicated, partial, cut = of_kind["replicated"], of_kind["partial"], of_kind["cut"]
    replicas = math.prod(mesh.shape[a] for a in replicated)
    index = rows.transpose(cut + partial + replicated).reshape(-1, replicas)
    summands = math.prod(mesh.shape[a] for a in partial)
    problem = _coverage(index[:: max(summands, 1)], held, global_shape)
    if problem:
        return problem
    averaged = [a for a in partial if placements[a].reduce_op == "avg"]
    return CombinationPlan(
        ranks=tuple(holding.rank for holding in held),
        index=index,
        summands=summands if partial else 0,
        divisor=float(math.prod(mesh.shape[a] for a in averaged)),
        has_offsets=not cut or all(holding.ranges is not None for holding in held),
    )


def apply_plan(plan: CombinationPlan, rows: NDArray[Any]) -> Combined:
    """Return the statistics of the whole from digest rows in the order of the plan's ranks.

    Args:
        plan: what `plan_pieces` made for these rows.
        rows: structured array with the digest fields of spool/cells.py's VALUE_DTYPE.
    """
    hashes, counts = rows["hash"][plan.index], rows["count"][plan.index]
    differ = (hashes != hashes[:, :1]) | (counts != counts[:, :1])
    if differ.any():
        first = int(np.flatnonzero(differ.any(axis=1))[0])
        ranks = ranks_named(plan.ranks[i] for i in plan.index[first].tolist())
        return Combined(
            ranks=plan.ranks, note=f"replicas differ: {ranks} should hold the same values"
        )
    pieces = rows[plan.index[:, 0]]
    return _sum_of_partials(plan, pieces) if plan.summands else _union(plan, pieces)


def _axes_by_kind(placements: Sequence[Placement]) -> dict[str, tuple[int, ...]]:
    def having(test: Callable[[Placement], bool]) -> tuple[int, ...]:
        return tuple(axis for axis, placement in enumerate(placements) if test(placement))

    return {
        "replicated": having(lambda p: p.pieces is Pieces.COPIES),
        "partial": having(lambda p: p.pieces is Pieces.SUMMANDS),
        "cut": having(lambda p: p.pieces is Pieces.SLICES),
    }


def _coverage(
    index: NDArray[np.int64], held: Sequence[Holding], global_shape: Sequence[int]
) -> str | None:
    """Return what is wrong where the pieces are not exactly the whole: every element once."""
    pieces = [held[row] for row in index[:, 0].tolist()]
    elements, whole = sum(math.prod(p.shape) for p in pieces), math.prod(global_shape)
    if elements != whole:
        return f"the shards hold {elements} elements, the whole tensor {whole}"
    boxes = [p.ranges for p in pieces if p.ranges is not None and math.prod(p.shape)]
    if len(set(boxes)) != len(boxes):
        return "two shards claim the same global indices"
    return None


def _sketch(plan: CombinationPlan, rows: NDArray[Any]) -> tuple[float, ...] | None:
    if not plan.has_offsets:
        return None
    return tuple((rows["sketch"].sum(axis=0) / plan.divisor).tolist())


class _Pieces:
    """Pieces of a whole that hold different elements of it: what combination needs of them."""

    def __init__(self, rows: NDArray[Any]) -> None:
        finite = finite_counts(rows).astype(np.float64)
        self.rows = rows
        self.total = math.fsum(finite.tolist())
        """Finite elements of all."""
        self.some = rows[finite > 0]
        self.weights: NDArray[np.float64] = finite[finite > 0]

    def mean(self, name: str) -> float:
        """Return the mean of means."""
        if not self.total:
            return math.nan
        return math.fsum((self.some[name] * self.weights).tolist()) / self.total

    def spread(self, name: str) -> float:
        """Return the standard deviation over all, from those of the pieces and their means."""
        if self.total <= 1:
            return math.nan
        mean, weights = self.mean("mean"), self.weights
        within = np.where(weights > 1, np.nan_to_num(self.some[name]) ** 2 * (weights - 1), 0.0)
        between = (self.some["mean"] - mean) ** 2 * weights
        return math.sqrt(math.fsum([*within.tolist(), *between.tolist()]) / (self.total - 1))

    def least(self, name: str) -> float:
        """Return the least."""
        return float(self.some[name].min()) if self.some.size else math.nan

    def greatest(self, name: str) -> float:
        """Return the greatest."""
        return float(self.some[name].max()) if self.some.size else math.nan


_OVER_SHARDS: Final[dict[OverShards, Callable[[_Pieces, str], float | None]]] = {
    OverShards.SUM: lambda pieces, name: pieces.rows[name].sum().item(),
    OverShards.LEAST: _Pieces.least,
    OverShards.GREATEST: _Pieces.greatest,
    OverShards.MEAN: _Pieces.mean,
    OverShards.SPREAD: _Pieces.spread,
    OverShards.ROOT_OF_SQUARES: lambda pieces, name: _norm(pieces.rows[name]),
    OverShards.UNKNOWN: lambda pieces, name: None,
}


def _union(plan: CombinationPlan, rows: NDArray[Any]) -> Combined:
    pieces = _Pieces(rows)
    return Combined.of(
        {s.name: _OVER_SHARDS[s.over_shards](pieces, s.name) for s in STATISTICS},
        ranks=plan.ranks,
        note=None if plan.has_offsets else NO_OFFSETS_NOTE,
        sketch=_sketch(plan, rows),
    )


def _norm(parts: NDArray[np.float64]) -> float:
    largest = float(parts.max(initial=0.0))
    if not largest or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(math.fsum(((parts / largest) ** 2).tolist()))


def _sum_of_partials(plan: CombinationPlan, rows: NDArray[Any]) -> Combined:
    """Return what is linear of pieces that add up to each element: of nothing else is it known."""
    count = int(rows["count"].sum()) // plan.summands
    weights = finite_counts(rows).astype(np.float64)
    some = weights > 0
    is_finite = bool((weights == rows["count"]).all())
    note = PARTIAL_NOTE if plan.has_offsets else f"{PARTIAL_NOTE}; {NO_OFFSETS_NOTE}"
    if not is_finite:
        note += "; not every summand is finite, so the mean is not known"

    def summed(name: str) -> float:
        if not (count and is_finite):
            return math.nan
        return math.fsum((rows[name][some] * weights[some]).tolist()) / plan.divisor / count

    linear = [s.name for s in STATISTICS if s.over_shards is OverShards.MEAN]
    return Combined.of(
        {"count": count} | {name: summed(name) for name in linear},
        ranks=plan.ranks,
        note=note,
        sketch=_sketch(plan, rows),
    )
