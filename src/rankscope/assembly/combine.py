"""Global statistics of a tensor that no rank holds whole, from the digests of its shards.

Which ranks hold pieces of the whole, replicas of each other or summands of a partial is said by
`layout/plan.py`. A *plan* here says the same of rows of numbers. Applying it is arithmetic:

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

from rankscope.layout.placement import PieceKind
from rankscope.layout.plan import Piece, pieces_of, tiling_problem
from rankscope.record.notes import Note, NoteKind
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.statistics import STATISTICS, OverShards, finite_counts
from rankscope.record.wholestatistics import Combined

__all__ = ["CombinationPlan", "Combined", "apply_plan", "plan_rows"]

PARTIAL_NOTE = "a partial is reduced later: only mean and sketch are linear"
NO_OFFSETS_NOTE = "no offsets were recorded: the sketches of its shards do not add up"


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinationPlan:
    """Which rows to add and which to compare."""

    ranks: tuple[int, ...]
    """Every rank of the mesh, in the order of the rows."""
    index: NDArray[np.int64]
    """[pieces, replicas] row numbers; replicas of a piece hold the same values."""
    is_partial: bool
    """True where the pieces are summands of what they will be reduced to."""
    summands: int
    """Pieces that add up to one element (product of the Partial axes), 1 without a partial."""
    divisor: float
    """What the sum of the summands is divided by (product of the Partial(avg) axes)."""
    has_offsets: bool
    """False where shards do not know their place: their sketches cannot be added."""


def plan_rows(held: Sequence[tuple[int, Piece]]) -> CombinationPlan | str:
    """Return how rows of numbers make up those of the global tensor, or why they do not.

    Numbers are combined only where every rank of the mesh has recorded its piece.

    Args:
        held: the rank of each row and its piece; all of one mesh, with one layout.
    """
    layout, whole = held[0][1].layout, held[0][1].global_shape
    mesh = layout.mesh
    assert mesh is not None and whole is not None
    for placement in layout.placements:
        if not placement.is_composable:
            return f"{placement} does not compose"
    row_of = {rank: row for row, (rank, _) in enumerate(held)}
    if len(row_of) != len(held):
        return "a rank has several values here"
    missing = [rank for rank in mesh.ranks if rank not in row_of]
    if missing:
        return f"no value from {ranks_named(missing)}"
    outside = sorted(set(row_of) - set(mesh.ranks))
    if outside:
        return f"not in the mesh: {ranks_named(outside)}"
    pieces = pieces_of(mesh, layout.placements)
    first = [held[row_of[part.summands[0][0]]][1] for part in pieces.parts]
    problem = _coverage(whole, first)
    if problem:
        return problem
    kinds = {placement.pieces for placement in layout.placements}
    # by rank, whatever torch's order of reducing is: sums of sketches depend on it in the last bit
    copies = [ranks for part in pieces.parts for ranks in sorted(part.summands)]
    return CombinationPlan(
        ranks=tuple(row_of),
        index=np.array([[row_of[rank] for rank in ranks] for ranks in copies], np.int64),
        is_partial=PieceKind.SUMMANDS in kinds,
        summands=len(pieces.parts[0].summands),
        divisor=float(math.prod(each.size for each in pieces.reductions if each.op == "avg")),
        has_offsets=PieceKind.SLICES not in kinds
        or all(_was_sketched_in_place(piece) for _, piece in held),
    )


def apply_plan(plan: CombinationPlan, rows: NDArray[Any]) -> Combined:
    """Return the statistics of the whole from digest rows in the order of the plan's ranks.

    Args:
        plan: what `plan_rows` made for these rows.
        rows: structured array with the digest fields of spool/recordformat.py's VALUE_DTYPE.
    """
    hashes, counts = rows["hash"][plan.index], rows["count"][plan.index]
    differ = (hashes != hashes[:, :1]) | (counts != counts[:, :1])
    if differ.any():
        first = int(np.flatnonzero(differ.any(axis=1))[0])
        ranks = ranks_text(plan.ranks[i] for i in plan.index[first].tolist())
        return Combined(ranks=plan.ranks, note=Note.of(NoteKind.REPLICAS_DIFFER, ranks=ranks))
    pieces = rows[plan.index[:, 0]]
    return _sum_of_partials(plan, pieces) if plan.is_partial else _union(plan, pieces)


def _coverage(whole: tuple[int, ...], pieces: Sequence[Piece]) -> str | None:
    """Return what is wrong where the pieces are not exactly the whole: every element once. Of
    pieces without a place only their number is known."""
    elements, wanted = sum(math.prod(piece.shape) for piece in pieces), math.prod(whole)
    if elements != wanted:
        return f"the shards hold {elements} elements, the whole tensor {wanted}"
    solid = [piece.ranges for piece in pieces if 0 not in piece.shape]
    placed = [ranges for ranges in solid if ranges is not None]
    return tiling_problem(whole, placed) if len(placed) == len(solid) else None


def _was_sketched_in_place(piece: Piece) -> bool:
    """True where the rank knew its offsets when it sketched the piece; those of pieces that were
    cut by hand are derived later, from all ranks' shapes."""
    return piece.ranges is not None and not piece.layout.source.is_from_all_ranks


def _sketch(plan: CombinationPlan, rows: NDArray[Any]) -> tuple[float, ...] | None:
    if not plan.has_offsets:
        return None
    return tuple((rows["sketch"].sum(axis=0) / plan.divisor).tolist())


class _Shards:
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


_OVER_SHARDS: Final[dict[OverShards, Callable[[_Shards, str], float | None]]] = {
    OverShards.SUM: lambda shards, name: shards.rows[name].sum().item(),
    OverShards.LEAST: _Shards.least,
    OverShards.GREATEST: _Shards.greatest,
    OverShards.MEAN: _Shards.mean,
    OverShards.SPREAD: _Shards.spread,
    OverShards.ROOT_OF_SQUARES: lambda shards, name: _norm(shards.rows[name]),
    OverShards.UNKNOWN: lambda shards, name: None,
}


def _union(plan: CombinationPlan, rows: NDArray[Any]) -> Combined:
    shards = _Shards(rows)
    return Combined.of(
        {s.name: _OVER_SHARDS[s.over_shards](shards, s.name) for s in STATISTICS},
        ranks=plan.ranks,
        note=None if plan.has_offsets else Note.words(NO_OFFSETS_NOTE),
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
        note=Note.words(note),
        sketch=_sketch(plan, rows),
    )
