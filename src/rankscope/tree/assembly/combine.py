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
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.layout.placement import PieceKind
from rankscope.layout.plan import Piece, pieces_of, tiling_problem
from rankscope.record.notes import Note, NoteKind
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.statistics import STATISTICS, Combined, OverShards, finite_counts

PARTIAL_NOTE = "a partial is reduced later: only mean and sketch are linear"
NO_OFFSETS_NOTE = "no offsets were recorded: the sketches of its shards do not add up"


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinationPlan:
    """Which rows to add and which to compare."""

    ranks: tuple[int, ...]
    index: NDArray[np.int64]
    """[pieces, replicas] row numbers; replicas of a piece hold the same values."""
    is_partial: bool
    summands: int
    """Pieces that add up to one element (product of the Partial axes), 1 without a partial."""
    divisor: float
    """What the sum of the summands is divided by (product of the Partial(avg) axes)."""
    has_offsets: bool
    """False where shards do not know their place: their sketches cannot be added."""


def plan_rows(rows: Sequence[tuple[int, Piece]]) -> CombinationPlan | str:
    """Return how rows of numbers make up those of the global tensor, or why they do not: every rank
    of the mesh must have recorded its piece. `rows`: rank and piece of each row, all of one
    mesh, with one layout."""
    layout, shape = rows[0][1].layout, rows[0][1].global_shape
    mesh = layout.mesh
    assert mesh is not None and shape is not None
    for placement in layout.placements:
        if not placement.is_composable:
            return f"{placement} does not compose"
    row_of = {rank: row for row, (rank, _) in enumerate(rows)}
    if len(row_of) != len(rows):
        return "a rank has several values here"
    if missing := [rank for rank in mesh.ranks if rank not in row_of]:
        return f"no value from {ranks_named(missing)}"
    if outside := sorted(set(row_of) - set(mesh.ranks)):
        return f"not in the mesh: {ranks_named(outside)}"
    pieces = pieces_of(mesh, layout.placements)
    parts = [*pieces.parts.values()]
    if problem := _coverage(shape, [rows[row_of[summands[0][0]]][1] for summands in parts]):
        return problem
    kinds = {placement.pieces for placement in layout.placements}
    # by rank, whatever torch's order of reducing is: sums of sketches depend on it in the last bit
    copies = [ranks for summands in parts for ranks in sorted(summands)]
    return CombinationPlan(
        ranks=tuple(row_of),
        index=np.array([[row_of[rank] for rank in ranks] for ranks in copies], np.int64),
        is_partial=PieceKind.SUMMANDS in kinds,
        summands=len(parts[0]),
        divisor=float(math.prod(r.size for r in pieces.reductions if r.op == "avg")),
        has_offsets=PieceKind.SLICES not in kinds
        or all(_was_sketched_in_place(piece) for _, piece in rows),
    )


def apply_plan(plan: CombinationPlan, rows: NDArray[Any]) -> Combined:
    """Return the statistics of one whole; `rows`: [ranks], else as of `apply_to_all`."""
    return apply_to_all(plan, rows[None])[0]


def apply_to_all(plan: CombinationPlan, rows: NDArray[Any]) -> list[Combined]:
    """Return the statistics of many wholes that lie in one way. `rows`: [wholes, ranks] of
    spool/recordformat.py's VALUE_DTYPE, ranks in the order of the plan's."""
    hashes, counts = rows["hash"][:, plan.index], rows["count"][:, plan.index]
    differ = ((hashes != hashes[:, :, :1]) | (counts != counts[:, :, :1])).any(axis=2)
    pieces = rows[:, plan.index[:, 0]]
    with np.errstate(over="ignore", invalid="ignore"):  # finite elements may have an infinite sum
        combined = _sum_of_partials(plan, pieces) if plan.is_partial else _union(plan, pieces)
    # a sum over one replica of each piece would hide the others: no number where any differ
    for number in np.flatnonzero(differ.any(axis=1)).tolist():
        first = int(np.flatnonzero(differ[number])[0])
        ranks = ranks_text(plan.ranks[i] for i in plan.index[first].tolist())
        note = Note.of(NoteKind.REPLICAS_DIFFER, ranks=ranks)
        combined[number] = Combined(ranks=plan.ranks, note=note)
    return combined


def _coverage(global_shape: tuple[int, ...], pieces: Sequence[Piece]) -> str | None:
    """Return why pieces do not tile the whole; pieces without a place are only counted."""
    elements, needed = sum(math.prod(piece.shape) for piece in pieces), math.prod(global_shape)
    if elements != needed:
        return f"the shards hold {elements} elements, the whole tensor {needed}"
    solid = [piece.ranges for piece in pieces if 0 not in piece.shape]
    placed = [ranges for ranges in solid if ranges is not None]
    return tiling_problem(global_shape, placed) if len(placed) == len(solid) else None


def _was_sketched_in_place(piece: Piece) -> bool:
    """True where the rank knew its offsets; those of pieces cut by hand are derived later."""
    return piece.ranges is not None and not piece.layout.source.is_from_all_ranks


def _sketches(plan: CombinationPlan, rows: NDArray[Any]) -> list[tuple[float, ...] | None]:
    if not plan.has_offsets:
        return [None] * len(rows)
    return [tuple(row) for row in (rows["sketch"].sum(axis=1) / plan.divisor).tolist()]


class _Shards:
    """Pieces of wholes, [wholes, pieces], that hold different elements of them."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows
        self.finite = finite_counts(rows).astype(np.float64)
        self.has_some = self.finite > 0
        self.total = np.array(_exact_sums(self.finite))

    def of_some(self, name: str, otherwise: float) -> NDArray[np.float64]:
        """Return a number of the pieces that have a finite element."""
        return np.where(self.has_some, self.rows[name], otherwise)

    @cached_property
    def means(self) -> list[float]:
        """Of all elements of each whole."""
        sums = _exact_sums(self.of_some("mean", 0.0) * self.finite)
        counts = self.total.tolist()
        return [part / count if count else math.nan for part, count in zip(sums, counts)]

    def spread(self, name: str) -> list[float]:
        """Return the standard deviation over all, from those of the pieces and their means."""
        mean, weights = np.array(self.means)[:, None], self.finite
        within = np.nan_to_num(self.rows[name]) ** 2 * (weights - 1)
        between = (self.of_some("mean", 0.0) - mean) ** 2 * weights
        parts = [np.where(weights > 1, within, 0.0), np.where(self.has_some, between, 0.0)]
        sums = zip(_exact_sums(np.concatenate(parts, axis=1)), self.total.tolist())
        return [math.sqrt(part / (count - 1)) if count > 1 else math.nan for part, count in sums]

    def least(self, name: str) -> list[float]:
        return self._where_any(self.of_some(name, math.inf).min(axis=1))

    def greatest(self, name: str) -> list[float]:
        return self._where_any(self.of_some(name, -math.inf).max(axis=1))

    def _where_any(self, numbers: NDArray[np.float64]) -> list[float]:
        extremes: list[float] = np.where(self.has_some.any(axis=1), numbers, math.nan).tolist()
        return extremes


def _exact_sums(rows: NDArray[np.float64]) -> list[float]:
    """Return the sum of each row, rounded once: whatever the order of the pieces."""
    return [_exact_sum(row) for row in rows.tolist()]


def _exact_sum(row: Sequence[float]) -> float:
    try:
        return math.fsum(row)
    except (OverflowError, ValueError):  # beyond the largest float, or infinities of both signs
        return sum(row)


_OVER_SHARDS: Final[dict[OverShards, Callable[[_Shards, str], list[Any]]]] = {
    OverShards.SUM: lambda shards, name: shards.rows[name].sum(axis=1).tolist(),
    OverShards.LEAST: _Shards.least,
    OverShards.GREATEST: _Shards.greatest,
    OverShards.MEAN: lambda shards, name: shards.means,
    OverShards.SPREAD: _Shards.spread,
    OverShards.ROOT_OF_SQUARES: lambda shards, name: _norms(shards.rows[name]),
    OverShards.UNKNOWN: lambda shards, name: [None] * len(shards.rows),
}


def _union(plan: CombinationPlan, rows: NDArray[Any]) -> list[Combined]:
    shards = _Shards(rows)
    numbers = {s.name: _OVER_SHARDS[s.over_shards](shards, s.name) for s in STATISTICS}
    note = None if plan.has_offsets else Note.words(NO_OFFSETS_NOTE)
    return [
        Combined.of(dict(zip(numbers, values)), ranks=plan.ranks, note=note, sketch=sketch)
        for *values, sketch in zip(*numbers.values(), _sketches(plan, rows))
    ]


def _norms(parts: NDArray[np.float64]) -> list[float]:
    largest = parts.max(axis=1, initial=0.0)
    is_plain = (largest != 0) & np.isfinite(largest)
    scale = np.where(is_plain, largest, 1.0)
    sums = _exact_sums(np.where(is_plain[:, None], (parts / scale[:, None]) ** 2, 0.0))
    plain = [largest_part * math.sqrt(part) for largest_part, part in zip(scale.tolist(), sums)]
    norms: list[float] = np.where(is_plain, plain, largest).tolist()
    return norms


def _sum_of_partials(plan: CombinationPlan, rows: NDArray[Any]) -> list[Combined]:
    """Return what is linear of pieces that add up to each element: of nothing else is it known."""
    shards = _Shards(rows)
    counts = (rows["count"].sum(axis=1).astype(np.int64) // plan.summands).tolist()
    is_finite = (shards.finite == rows["count"]).all(axis=1).tolist()
    linear = [s.name for s in STATISTICS if s.over_shards is OverShards.MEAN]
    sums = {name: _exact_sums(shards.of_some(name, 0.0) * shards.finite) for name in linear}
    sketches = _sketches(plan, rows)
    combined = []
    for number, count in enumerate(counts):
        numbers: dict[str, float] = {"count": count}
        for name in linear:
            is_known = count and is_finite[number]
            numbers[name] = sums[name][number] / plan.divisor / count if is_known else math.nan
        note = PARTIAL_NOTE if plan.has_offsets else f"{PARTIAL_NOTE}; {NO_OFFSETS_NOTE}"
        if not is_finite[number]:
            note += "; not every summand is finite, so the mean is not known"
        combined.append(
            Combined.of(numbers, ranks=plan.ranks, note=Note.words(note), sketch=sketches[number])
        )
    return combined
