"""How the ranks' pieces of a value make up its global tensor: a plan as data, from layouts alone.

For a 2x2 mesh ("dp", "tp") placed (Replicate(), Shard(0)) a tensor of shape (4,) has two parts,
each held by two ranks, which must hold the same values::

    [0:2]   ranks 0 and 2                [2:4]   ranks 1 and 3

Placed (Partial(sum), Shard(0)) the same two parts have two *summands* each, held by one rank each,
and a reduction that makes them one.

`pieces_of` says which ranks hold which part. Numbers need no more: `assembly/combine.py` adds up
digests by it. Bytes also need the place of every part: `plan_assembly` names which ranks to read,
in which order, and where the result goes; `tensors/rebuild.py` executes that. No torch, numpy or
process group is needed.

What cannot be put together is a `Refusal` that says why; it is never guessed.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankscope.errors import LayoutError
from rankscope.layout.placement import (
    Layout,
    Mesh,
    PieceKind,
    Placement,
    Ranges,
    global_ranges,
    length_of,
)

REDUCE_OPS = frozenset({"sum", "avg", "min", "max", "product", "band", "bor", "bxor"})
"""The reductions torch has a Partial for; of any other the meaning is not known."""
_MOST_RANKS = 8


class Obstacle(str, enum.Enum):
    """Why pieces do not make a whole."""

    UNKNOWN_LAYOUT = "unknown-layout"
    """Several ranks hold something, and nothing says how their values belong together."""
    PLACEMENT = "placement"
    """A placement whose reduction is its own (`_MaskPartial`, `_NormPartial`), or that torch
    gives no meaning."""
    MISSING_RANK = "missing-rank"
    """A piece that no other rank holds was not recorded."""
    SHAPE = "shape"
    """A rank holds another shape than its layout says."""
    RANGES = "ranges"
    """The pieces do not hold every element exactly once."""
    DISAGREEMENT = "disagreement"
    """The ranks of one mesh record different layouts or global shapes."""
    BATCH = "batch"
    """Values that are not batches of one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a global tensor cannot be put together."""

    obstacle: Obstacle
    message: str
    ranks: tuple[int, ...]
    """Whom it concerns, sorted."""

    @classmethod
    def about(cls, ranks: Iterable[int], obstacle: Obstacle, message: str) -> Refusal:
        """Return the refusal that concerns these ranks, given in any order."""
        return cls(obstacle=obstacle, message=message, ranks=tuple(sorted(set(ranks))))

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds, and what is known of its place in a whole."""

    shape: tuple[int, ...]
    """Local shape."""
    layout: Layout
    global_shape: tuple[int, ...] | None = None
    ranges: tuple[Ranges, ...] | None = None
    """Per dim the global indices held, where they were recorded or derived; otherwise they follow
    from the placements."""
    refusal: Refusal | None = None
    """Why it has no place, where that was found out earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One axis of a Partial: every `size` neighbours become one."""

    op: str
    """One of REDUCE_OPS."""
    size: int
    """Two or more."""
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a whole, and which ranks of the mesh hold it."""

    coordinate: tuple[int, ...]
    """Of its first rank, on every axis."""
    summands: tuple[tuple[int, ...], ...]
    """The values to reduce, one where nothing is reduced; for each the ranks, in mesh order, that
    should hold the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Which ranks hold which part of a whole: its shards, their summands and their replicas."""

    parts: tuple[Part, ...]
    """Every rank of the mesh is in one of them, once."""
    reductions: tuple[Reduction, ...]
    """Of the summands of each part, in the order in which they are applied; the first takes
    neighbouring summands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One part of the global tensor, and which ranks' values fill it."""

    ranges: tuple[Ranges, ...]
    """Per dim where it lies, in the order in which a piece holds its elements; never empty."""
    summands: tuple[tuple[int, ...], ...]
    """The values to reduce, one where nothing is reduced; for each the ranks, sorted, that should
    hold the same."""
    reductions: tuple[Reduction, ...] = ()
    """In the order in which they are applied; the first takes neighbouring summands."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that each of its pieces has."""
        return _lengths(self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyPlan:
    """Where each rank's piece goes. The boxes hold every element of the tensor exactly once."""

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """Parts with elements; () for a tensor without any."""
    ranks: tuple[int, ...]
    """Ranks that recorded a piece, those of empty shards included, sorted."""
    missing: tuple[int, ...] = ()
    """Ranks that should hold a piece and recorded none, while others hold the same: the tensor is
    whole, these replicas were not compared."""

    @property
    def reads(self) -> Iterator[int]:
        """The ranks whose pieces are read, in order, each once."""
        return itertools.chain.from_iterable(s for box in self.boxes for s in box.summands)


@functools.lru_cache(maxsize=1024)
def pieces_of(mesh: Mesh, placements: tuple[Placement, ...]) -> Pieces:
    """Return which ranks hold which part of a tensor that lies so.

    Summands are reduced in torch's order: that of the mesh axes, and from the last axis where the
    tensor is sharded as well. Only round-off depends on it.

    Args:
        mesh: the mesh the placements speak of.
        placements: one per mesh axis, each of a known kind.
    """
    cut = [axis for axis, p in enumerate(placements) if p.pieces is PieceKind.SLICES]
    order = [
        axis
        for axis, p in enumerate(placements)
        if p.pieces is PieceKind.SUMMANDS and mesh.shape[axis] > 1
    ]
    if any(mesh.shape[axis] > 1 for axis in cut):
        order.reverse()
    parts: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    first: dict[tuple[int, ...], tuple[int, ...]] = {}
    for at, rank in mesh.places():
        part, summand = tuple(at[a] for a in cut), tuple(at[a] for a in reversed(order))
        first.setdefault(part, at)
        parts.setdefault(part, {}).setdefault(summand, []).append(rank)
    return Pieces(
        parts=tuple(
            Part(
                coordinate=first[part],
                summands=tuple(tuple(summands[key]) for key in sorted(summands)),
            )
            for part, summands in parts.items()
        ),
        reductions=tuple(
            Reduction(op=str(placements[a].reduce_op), size=mesh.shape[a], axis=mesh.axes[a])
            for a in order
        ),
    )


def plan_assembly(
    global_shape: Sequence[int],
    layout: Layout,
    shapes: Mapping[int, Sequence[int]],
    ranges: Mapping[int, tuple[Ranges, ...]] | None = None,
) -> AssemblyPlan | Refusal:
    """Return how the pieces of one mesh make up the global tensor, or why they do not.

    A value that one rank alone holds under an unknown layout is whole.

    Args:
        global_shape: shape of the whole tensor.
        layout: its placements, and the mesh they speak of.
        shapes: {rank: local shape} of every rank that recorded a value. The shape of an empty shard
            is not checked, because it means nothing.
        ranges: {rank: global indices per dim} where these are known better than by the placements:
            a shard order that is not the mesh's, plain tensors that were split unevenly.
    """
    whole, held = tuple(global_shape), {rank: tuple(shape) for rank, shape in shapes.items()}
    mesh = layout.mesh
    if mesh is None:
        return _plan_alone(held)
    refusal = _placements_refusal(mesh, layout.placements) or _outsiders_refusal(mesh, held)
    if refusal:
        return refusal
    pieces = pieces_of(mesh, layout.placements)
    boxes: list[Box] = []
    lost: list[int] = []
    replicas_lost: list[int] = []
    for part in pieces.parts:
        members = [rank for summand in part.summands for rank in summand]
        try:
            found = _part_ranges(whole, layout, part.coordinate, members, ranges or {})
        except LayoutError as error:
            return Refusal.about(members, Obstacle.RANGES, str(error))
        misfits = [rank for rank in members if rank in held and not _fits(held[rank], found)]
        if misfits:
            text = (
                f"{ranks_words(misfits[:1])} holds shape {list(held[misfits[0]])}, "
                f"its layout says {list(_lengths(found))}"
            )
            return Refusal.about(misfits, Obstacle.SHAPE, text)
        if 0 in _lengths(found):
            continue
        present = [[rank for rank in summand if rank in held] for summand in part.summands]
        for wanted, there in zip(part.summands, present):
            (replicas_lost if there else lost).extend(set(wanted).difference(there))
        boxes.append(
            Box(
                ranges=found,
                summands=tuple(tuple(sorted(there)) for there in present),
                reductions=pieces.reductions,
            )
        )
    if lost or not held.keys() & set(mesh.ranks):
        absent = lost or mesh.ranks
        text = f"no value was recorded on {ranks_words(absent)}, and no other rank holds its part"
        return Refusal.about(absent, Obstacle.MISSING_RANK, text)
    problem = tiling_problem(whole, [box.ranges for box in boxes])
    if problem:
        return Refusal.about(held, Obstacle.RANGES, problem)
    return AssemblyPlan(
        global_shape=whole,
        boxes=tuple(boxes),
        ranks=tuple(sorted(set(mesh.ranks) & set(held))),
        missing=tuple(sorted(replicas_lost)),
    )


def plan_assemblies(pieces: Mapping[int, Piece]) -> tuple[AssemblyPlan | Refusal, ...]:
    """Return one plan per global value that these ranks hold together, by lowest rank.

    Each mesh of a family has a value of its own: the rows of a ("dp", "tp") mesh whose activations
    are placed on "tp" alone hold different batches.
    """
    by_mesh: dict[Mesh | None, dict[int, Piece]] = {}
    for rank, piece in sorted(pieces.items()):
        by_mesh.setdefault(piece.layout.mesh, {})[rank] = piece
    return tuple(
        _plan_of_one_mesh(held)
        if mesh is not None or len(held) == len(pieces)
        else Refusal.about(
            held,
            Obstacle.DISAGREEMENT,
            f"{ranks_words(held)} have no layout for a value that has one on other ranks",
        )
        for mesh, held in by_mesh.items()
    )


# ---- one mesh ------------------------------------------------------------------------------------


def _plan_of_one_mesh(held: Mapping[int, Piece]) -> AssemblyPlan | Refusal:
    first = next(iter(held.values()))
    for piece in held.values():
        if piece.refusal:
            return piece.refusal
    if any((p.layout, p.global_shape) != (first.layout, first.global_shape) for p in held.values()):
        text = f"{ranks_words(held)} record different layouts or global shapes for one value"
        return Refusal.about(held, Obstacle.DISAGREEMENT, text)
    if first.layout.mesh is not None and first.global_shape is None:
        text = f"the global shape of what {ranks_words(held)} hold was not recorded"
        return Refusal.about(held, Obstacle.UNKNOWN_LAYOUT, text)
    return plan_assembly(
        first.global_shape or (),
        first.layout,
        {rank: piece.shape for rank, piece in held.items()},
        {rank: piece.ranges for rank, piece in held.items() if piece.ranges is not None},
    )


def _plan_alone(held: Mapping[int, tuple[int, ...]]) -> AssemblyPlan | Refusal:
    """Plan for values whose layout is unknown: that of a single rank is whole."""
    if len(held) != 1:
        text = f"nothing says how the values of {ranks_words(held)} belong together"
        return Refusal.about(held, Obstacle.UNKNOWN_LAYOUT, text)
    rank, shape = next(iter(held.items()))
    ranges = tuple(((0, size),) for size in shape)
    boxes = () if 0 in shape else (Box(ranges=ranges, summands=((rank,),)),)
    return AssemblyPlan(global_shape=shape, boxes=boxes, ranks=(rank,))


def _placements_refusal(mesh: Mesh, placements: Sequence[Placement]) -> Refusal | None:
    ops = {p.reduce_op for p in placements if p.reduce_op is not None}
    for placement in placements:
        if placement.pieces is PieceKind.UNKNOWN or (
            placement.reduce_op is not None and placement.reduce_op not in REDUCE_OPS
        ):
            text = f"{placement} is reduced in a way of its own, which was not recorded"
            return Refusal.about(mesh.ranks, Obstacle.PLACEMENT, text)
    if len(ops) > 1 and ops != {"sum", "avg"}:
        text = f"Partial({') and Partial('.join(sorted(map(str, ops)))}) have no defined order"
        return Refusal.about(mesh.ranks, Obstacle.PLACEMENT, text)
    return None


def _outsiders_refusal(mesh: Mesh, held: Mapping[int, tuple[int, ...]]) -> Refusal | None:
    """Refuse values of ranks outside the mesh; torch gives those an empty tensor."""
    members = set(mesh.ranks)
    outside = [rank for rank, shape in held.items() if rank not in members and 0 not in shape]
    if not outside:
        return None
    text = f"{ranks_words(outside)} hold a value, but are not in its mesh"
    return Refusal.about(outside, Obstacle.DISAGREEMENT, text)


def _part_ranges(
    whole: tuple[int, ...],
    layout: Layout,
    coordinate: tuple[int, ...],
    members: Sequence[int],
    known: Mapping[int, tuple[Ranges, ...]],
) -> tuple[Ranges, ...]:
    recorded = {known[rank] for rank in members if rank in known}
    if len(recorded) > 1:
        raise LayoutError(f"{ranks_words(members)} claim different parts, but hold one shard")
    if not recorded:
        assert layout.mesh is not None
        return global_ranges(whole, layout.mesh.shape, coordinate, layout.placements)
    found = recorded.pop()
    if len(found) != len(whole):
        raise LayoutError(
            f"{ranks_words(members)}: ranges of {len(found)} dims for {len(whole)} dims"
        )
    return found


def _fits(shape: tuple[int, ...], ranges: tuple[Ranges, ...]) -> bool:
    wanted = _lengths(ranges)
    return shape == wanted or (0 in shape and 0 in wanted)


def tiling_problem(whole: tuple[int, ...], boxes: Sequence[tuple[Ranges, ...]]) -> str | None:
    """Return what is wrong where these boxes (without empty ones) do not hold every element exactly
    once.

    The dims are cut independently of each other, so the boxes form a grid: it is enough that the
    distinct parts of each dim cover it once, and that every crossing is there.
    """
    if 0 in whole:
        return f"shape {list(whole)} has no elements, but ranks hold some" if boxes else None
    crossings = 1
    for dim, size in enumerate(whole):
        parts = {box[dim] for box in boxes}
        edge = 0
        for start, stop in sorted(run for part in parts for run in part):
            if start != edge or stop <= start:
                return f"dim {dim}: the pieces leave out or repeat what lies around {start}"
            edge = stop
        if edge != size:
            return f"dim {dim}: the pieces end at {edge}, the whole tensor at {size}"
        crossings *= len(parts)
    if len(set(boxes)) != len(boxes) or len(boxes) != crossings:
        return f"{len(boxes)} pieces, but their cuts make {crossings}"
    return None


# ---- small things --------------------------------------------------------------------------------


def _lengths(ranges: tuple[Ranges, ...]) -> tuple[int, ...]:
    return tuple(map(length_of, ranges))


def ranks_words(ranks: Iterable[int]) -> str:
    """Return "rank 3", "ranks 0, 2", bounded."""
    known = sorted(set(ranks))
    listed = ", ".join(map(str, known[:_MOST_RANKS]))
    more = f" and {len(known) - _MOST_RANKS} more" if len(known) > _MOST_RANKS else ""
    return f"rank{'s' if len(known) != 1 else ''} {listed or '(none)'}{more}"
