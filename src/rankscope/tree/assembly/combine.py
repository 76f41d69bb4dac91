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

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

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
    if outside := sorted(set(row_of) - set(mesh.ranks)):
        return f"not in the mesh: {ranks_named(outside)}"
    pieces = pieces_of(mesh, layout.placements)
    absent_ranks = set(mesh.ranks) - row_of.keys()
    parts = [
        part for part in pieces.parts.values() if absent_ranks.isdisjoint(itertools.chain(*part))
    ]
    problem = _coverage(shape, [rows[row_of[summands[0][0]]][1] for summands in parts])
    # ranks of FSDP1 without an element have no gradient
    if absent_ranks and (
        problem or sum(len(ranks) for part in parts for ranks in part) < len(row_of)
    ):
        return f"no value from {ranks_named(sorted(absent_ranks))}"
    if problem:
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


def apply_to_all(plan: CombinationPlan, rows: NDArray[Any]) -> list[Combined]:
    """Return the statistics of many wholes that lie in one way. `rows`: [wholes, ranks] of
    spool/recordformat.py's VALUE_DTYPE, ranks in the order of the plan's."""
    differ = replicas_differ(plan.index, rows)
    columns = combine(plan, rows[:, plan.index[:, 0]])
    sketches: list[Any] = [None] * len(rows)
    if columns.sketches is not None:
        sketches = [*map(tuple, columns.sketches.tolist())]
    lists = [column.tolist() for column in columns.numbers.values()]
    combined = [
        Combined.of(dict(zip(columns.numbers, numbers)), ranks=plan.ranks, note=note, sketch=sketch)
        for *numbers, note, sketch in zip(*lists, columns.notes, sketches)
    ]
    # a sum over one replica of each piece would hide the others: no number where any differ
    for number in np.flatnonzero(differ.any(axis=1)).tolist():
        first = int(np.flatnonzero(differ[number])[0])
        ranks = ranks_text(plan.ranks[i] for i in plan.index[first].tolist())
        note = Note.of(NoteKind.REPLICAS_DIFFER, ranks=ranks)
        combined[number] = Combined(ranks=plan.ranks, note=note)
    return combined


class CombinedColumns(NamedTuple):
    """Statistics of many wholes that lie in one way."""

    numbers: dict[str, NDArray[Any]]
    """[wholes] by name; without those that cannot be known."""
    sketches: NDArray[np.float64] | None
    """[wholes, K]; None where pieces do not know their place."""
    notes: list[Note | None]
    """Why numbers are missing."""


def combine(plan: CombinationPlan, pieces: NDArray[Any]) -> CombinedColumns:
    """Return the same of one replica of each piece. `pieces`: [wholes, pieces] of such rows."""
    with np.errstate(over="ignore", invalid="ignore"):  # finite elements may have an infinite sum
        return _sum_of_partials(plan, pieces) if plan.is_partial else _union(plan, pieces)


def replicas_differ(index: NDArray[np.int64], rows: NDArray[Any]) -> NDArray[Any]:
    """Return [wholes, pieces] True where replicas of a piece hold different values. `index`:
    [pieces, replicas] of a plan, `rows`: [wholes, ranks]."""
    hashes, counts = rows["hash"][:, index], rows["count"][:, index]
    is_other = (hashes != hashes[:, :, :1]) | (counts != counts[:, :, :1])
    differ: NDArray[Any] = np.logical_or.reduce(is_other, axis=2)
    return differ


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


def _sketches(plan: CombinationPlan, rows: NDArray[Any]) -> NDArray[np.float64] | None:
    return rows["sketch"].sum(axis=1) / plan.divisor if plan.has_offsets else None


class _Shards:
    """Pieces of wholes, [wholes, pieces], that hold different elements of them."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows
        self.finite = finite_counts(rows).astype(np.float64)
        self.has_some = self.finite > 0
        self.total = self.finite.sum(axis=1)  # whole numbers, so this is exact

    def of_some(self, name: str, otherwise: float) -> NDArray[np.float64]:
        """Return a number of the pieces that have a finite element."""
        return np.where(self.has_some, self.rows[name], otherwise)

    @cached_property
    def means(self) -> NDArray[np.float64]:
        """Of all elements of each whole."""
        sums = _exact_sums(self.of_some("mean", 0.0) * self.finite)
        return np.where(self.total > 0, sums / np.maximum(self.total, 1), math.nan)

    def spread(self, name: str) -> NDArray[np.float64]:
        """Return the standard deviation over all, from those of the pieces and their means."""
        weights = self.finite
        within = np.nan_to_num(self.rows[name]) ** 2 * (weights - 1)
        between = (self.of_some("mean", 0.0) - self.means[:, None]) ** 2 * weights
        parts = [np.where(weights > 1, within, 0.0), np.where(self.has_some, between, 0.0)]
        sums = _exact_sums(np.concatenate(parts, axis=1))
        return np.where(self.total > 1, np.sqrt(sums / np.maximum(self.total - 1, 1)), math.nan)

    def least(self, name: str) -> NDArray[np.float64]:
        return self._where_any(self.of_some(name, math.inf).min(axis=1))

    def greatest(self, name: str) -> NDArray[np.float64]:
        return self._where_any(self.of_some(name, -math.inf).max(axis=1))

    def _where_any(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(self.has_some.any(axis=1), numbers, math.nan)


def _exact_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each row, rounded once: whatever the order of the pieces."""
    lists = rows.tolist()
    try:
        return np.array([*map(math.fsum, lists)])
    except (OverflowError, ValueError):  # beyond the largest float, or infinities of both signs
        return np.array([_sum_beyond(row) for row in lists])


def _sum_beyond(row: Sequence[float]) -> float:
    try:
        return math.fsum(row)
    except (OverflowError, ValueError):
        return sum(row)


_OVER_SHARDS: Final[dict[OverShards, Callable[[_Shards, str], NDArray[Any]]]] = {
    OverShards.SUM: lambda shards, name: shards.rows[name].sum(axis=1),
    OverShards.LEAST: _Shards.least,
    OverShards.GREATEST: _Shards.greatest,
    OverShards.MEAN: lambda shards, name: shards.means,
    OverShards.SPREAD: _Shards.spread,
    OverShards.ROOT_OF_SQUARES: lambda shards, name: _norms(shards.rows[name]),
}
"""Of all rules but UNKNOWN."""


def _union(plan: CombinationPlan, rows: NDArray[Any]) -> CombinedColumns:
    shards = _Shards(rows)
    rules = ((s.name, _OVER_SHARDS.get(s.over_shards)) for s in STATISTICS)
    numbers = {name: rule(shards, name) for name, rule in rules if rule is not None}
    note = None if plan.has_offsets else Note.words(NO_OFFSETS_NOTE)
    return CombinedColumns(numbers, _sketches(plan, rows), [note] * len(rows))


def _norms(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = parts.max(axis=1, initial=0.0)
    is_plain = (largest != 0) & np.isfinite(largest)
    scale = np.where(is_plain, largest, 1.0)
    sums = _exact_sums(np.where(is_plain[:, None], (parts / scale[:, None]) ** 2, 0.0))
    return np.where(is_plain, scale * np.sqrt(sums), largest)


def _sum_of_partials(plan: CombinationPlan, rows: NDArray[Any]) -> CombinedColumns:
    """Return what is linear of pieces that add up to each element: of nothing else is it known."""
    shards = _Shards(rows)
    counts = rows["count"].sum(axis=1).astype(np.int64) // plan.summands
    is_finite = (shards.finite == rows["count"]).all(axis=1)
    numbers: dict[str, NDArray[Any]] = {"count": counts}
    for name in (s.name for s in STATISTICS if s.over_shards is OverShards.MEAN):
        sums = _exact_sums(shards.of_some(name, 0.0) * shards.finite)
        means = sums / plan.divisor / np.maximum(counts, 1)
        numbers[name] = np.where(is_finite & (counts > 0), means, math.nan)
    text = PARTIAL_NOTE if plan.has_offsets else f"{PARTIAL_NOTE}; {NO_OFFSETS_NOTE}"
    notes = (
        Note.words(text),
        Note.words(f"{text}; not every summand is finite, so the mean is not known"),
    )
    return CombinedColumns(
        numbers, _sketches(plan, rows), [notes[not is_known] for is_known in is_finite.tolist()]
    )
