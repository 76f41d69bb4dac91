"""How the ranks' pieces of a value make up its global tensor: a plan as data, from layouts alone.

For a 2x2 mesh ("dp", "tp") placed (Replicate(), Shard(0)) a tensor of shape (4,) has two parts,
each held by two ranks, which must hold the same values::

    [0:2]   ranks 0 and 2                [2:4]   ranks 1 and 3

Placed (Partial(sum), Shard(0)) the same two parts have two *summands* each, held by one rank each,
and a reduction that makes them one.

`pieces_of` says which ranks hold which part. Numbers need no more: `tree/assembly/combine.py` adds
up digests by it. Bytes also need the place of every part: `plan_assembly` names which ranks to
read, in which order, and where the result goes; `tree/tensors/rebuild.py` executes that. No torch,
numpy or process group is needed. What cannot be put together is a `LayoutError` that says why.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
"""Reductions that torch's Partial knows; the meaning of any other is unknown."""
_MOST_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds (its local shape), and its place in a whole as far as that is known."""

    shape: tuple[int, ...]
    layout: Layout
    global_shape: tuple[int, ...] | None = None
    ranges: tuple[Ranges, ...] | None = None
    """Per dim the global indices held, if they were recorded or derived."""
    refusal: str = ""
    """Why the value has no place, if that was found out earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One axis of a Partial: an op of REDUCE_OPS reduces every `size` (2 or more) neighbours."""

    op: str
    size: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Which ranks hold which part of a whole: its shards, their summands and their replicas."""

    parts: Mapping[tuple[int, ...], tuple[tuple[int, ...], ...]]
    """{coordinate of a part's first rank: the values to reduce, a single one without a reduction;
    for each the ranks, in mesh order, that should hold the same}. Every rank is in one part,
    once."""
    reductions: tuple[Reduction, ...]
    """Reductions of each part, in order of application; the first takes neighbouring summands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One part of the global tensor, and which ranks' values fill it."""

    ranges: tuple[Ranges, ...]
    """Per dim the global indices, in the order in which a piece holds its elements; never empty."""
    summands: tuple[tuple[int, ...], ...]
    """The values to reduce; for each the ranks, sorted, that should hold the same."""
    reductions: tuple[Reduction, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that each of its pieces has."""
        return _lengths(self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyPlan:
    """Where each rank's piece goes. The boxes hold every element of the tensor exactly once."""

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """Parts with elements; () for a tensor without elements."""
    ranks: tuple[int, ...]
    """Ranks that recorded a piece, those of empty shards included, sorted."""
    missing: tuple[int, ...] = ()
    """Ranks that recorded no piece although they should hold the same as others: the tensor is
    whole, but these replicas were not compared."""

    @property
    def reads(self) -> Iterator[int]:
        """The ranks whose pieces are read, in order, each once."""
        return itertools.chain.from_iterable(s for box in self.boxes for s in box.summands)


@functools.lru_cache(maxsize=1024)
def pieces_of(mesh: Mesh, placements: tuple[Placement, ...]) -> Pieces:
    """Return which ranks hold which part of a tensor that lies so, by one placement of a known kind
    per axis.

    Summands are reduced in torch's order: that of the mesh axes, and from the last axis where the
    tensor is sharded as well. Only round-off depends on it.
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
        # the axis that is reduced first varies fastest: neighbours in sorted order are its summands
        part, summand = tuple(at[a] for a in cut), tuple(at[a] for a in reversed(order))
        first.setdefault(part, at)
        parts.setdefault(part, {}).setdefault(summand, []).append(rank)
    return Pieces(
        parts={
            first[part]: tuple(tuple(summands[key]) for key in sorted(summands))
            for part, summands in parts.items()
        },
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
) -> AssemblyPlan:
    """Return how the pieces of one mesh make up the global tensor.

    A value that one rank alone holds under an unknown layout is whole.

    Args:
        global_shape: shape of the whole tensor.
        layout: its placements, and the mesh they are on.
        shapes: {rank: local shape} of every rank that recorded a value. The shape of an empty shard
            is not checked, because it means nothing.
        ranges: {rank: global indices per dim} where these are known better than by the placements:
            a shard order that is not the mesh's, plain tensors that were split unevenly.

    Raises:
        LayoutError: they do not; says why.
    """
    full_shape = tuple(global_shape)
    sizes = {rank: tuple(shape) for rank, shape in shapes.items()}
    mesh = layout.mesh
    if mesh is None:
        return _plan_alone(sizes)
    _must_be_defined(layout.placements)
    # torch gives ranks outside the mesh an empty tensor
    outside = [rank for rank, size in sizes.items() if rank not in mesh.ranks and 0 not in size]
    if outside:
        raise LayoutError(f"{ranks_words(outside)} hold a value, but are not in its mesh")
    pieces = pieces_of(mesh, layout.placements)
    boxes: list[Box] = []
    lost: list[int] = []
    replicas_lost: list[int] = []
    for coordinate, summands in pieces.parts.items():
        members = [rank for summand in summands for rank in summand]
        part = _part_ranges(full_shape, layout, coordinate, members, ranges or {})
        misfits = [rank for rank in members if rank in sizes and not _fits(sizes[rank], part)]
        if misfits:
            raise LayoutError(
                f"{ranks_words(misfits[:1])} holds shape {list(sizes[misfits[0]])}, "
                f"its layout says {list(_lengths(part))}"
            )
        # a dim that is shorter than its axis leaves shards without elements: no rank has to have
        # recorded one
        if 0 in _lengths(part):
            continue
        present = [[rank for rank in summand if rank in sizes] for summand in summands]
        for expected, recorded in zip(summands, present):
            (replicas_lost if recorded else lost).extend(set(expected).difference(recorded))
        boxes.append(
            Box(
                ranges=part,
                summands=tuple(tuple(sorted(recorded)) for recorded in present),
                reductions=pieces.reductions,
            )
        )
    if lost or not sizes.keys() & set(mesh.ranks):
        absent = ranks_words(lost or mesh.ranks)
        raise LayoutError(f"no value was recorded on {absent}, and no other rank holds its part")
    problem = tiling_problem(full_shape, [box.ranges for box in boxes])
    if problem:
        raise LayoutError(problem)
    return AssemblyPlan(
        global_shape=full_shape,
        boxes=tuple(boxes),
        ranks=tuple(sorted(set(mesh.ranks) & set(sizes))),
        missing=tuple(sorted(replicas_lost)),
    )


def plan_assemblies(pieces: Mapping[int, Piece]) -> tuple[AssemblyPlan, ...]:
    """Return one plan per global value that these ranks hold together, by lowest rank.

    Each mesh of a family has a value of its own: the rows of a ("dp", "tp") mesh whose activations
    are placed on "tp" alone hold different batches. Raises LayoutError where the pieces of a mesh
    make no whole; says why.
    """
    by_mesh: dict[Mesh | None, dict[int, Piece]] = {}
    for rank, piece in sorted(pieces.items()):
        by_mesh.setdefault(piece.layout.mesh, {})[rank] = piece
    for mesh_pieces in by_mesh.values():
        if problem := next((piece.refusal for piece in mesh_pieces.values() if piece.refusal), ""):
            raise LayoutError(problem)
    plain = by_mesh.get(None, {})
    if plain and len(by_mesh) > 1:
        raise LayoutError(
            f"{ranks_words(plain)} have no layout for a value that has one on other ranks"
        )
    return tuple(map(_plan_of_one_mesh, by_mesh.values()))


def _plan_of_one_mesh(pieces: Mapping[int, Piece]) -> AssemblyPlan:
    first = next(iter(pieces.values()))
    if any(
        (p.layout, p.global_shape) != (first.layout, first.global_shape) for p in pieces.values()
    ):
        raise LayoutError(
            f"{ranks_words(pieces)} record different layouts or global shapes for one value"
        )
    if first.layout.mesh is not None and first.global_shape is None:
        raise LayoutError(f"the global shape of what {ranks_words(pieces)} hold was not recorded")
    return plan_assembly(
        first.global_shape or (),
        first.layout,
        {rank: piece.shape for rank, piece in pieces.items()},
        {rank: piece.ranges for rank, piece in pieces.items() if piece.ranges is not None},
    )


def _plan_alone(sizes: Mapping[int, tuple[int, ...]]) -> AssemblyPlan:
    if len(sizes) != 1:
        raise LayoutError(f"nothing says how the values of {ranks_words(sizes)} belong together")
    rank, shape = next(iter(sizes.items()))
    ranges = tuple(((0, size),) for size in shape)
    boxes = () if 0 in shape else (Box(ranges=ranges, summands=((rank,),)),)
    return AssemblyPlan(global_shape=shape, boxes=boxes, ranks=(rank,))


def _must_be_defined(placements: Sequence[Placement]) -> None:
    ops = {p.reduce_op for p in placements if p.reduce_op is not None}
    for placement in placements:
        if placement.pieces is PieceKind.UNKNOWN or (
            placement.reduce_op is not None and placement.reduce_op not in REDUCE_OPS
        ):
            raise LayoutError(f"{placement} is reduced in a way of its own, which was not recorded")
    # a sum of averages is an average of sums; no two of the others may change places
    if len(ops) > 1 and ops != {"sum", "avg"}:
        listed = ") and Partial(".join(sorted(map(str, ops)))
        raise LayoutError(f"Partial({listed}) have no defined order")


def _part_ranges(
    shape: tuple[int, ...],
    layout: Layout,
    coordinate: tuple[int, ...],
    members: Sequence[int],
    rank_ranges: Mapping[int, tuple[Ranges, ...]],
) -> tuple[Ranges, ...]:
    # what ranks recorded comes before what placements say: torch may cut in another order
    recorded = {rank_ranges[rank] for rank in members if rank in rank_ranges}
    if len(recorded) > 1:
        raise LayoutError(f"{ranks_words(members)} claim different parts, but hold one shard")
    if not recorded:
        assert layout.mesh is not None
        return global_ranges(shape, layout.mesh.shape, coordinate, layout.placements)
    part = recorded.pop()
    if len(part) != len(shape):
        raise LayoutError(
            f"{ranks_words(members)}: ranges of {len(part)} dims for {len(shape)} dims"
        )
    return part


def _fits(shape: tuple[int, ...], ranges: tuple[Ranges, ...]) -> bool:
    expected = _lengths(ranges)
    return shape == expected or (0 in shape and 0 in expected)


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[tuple[Ranges, ...]]) -> str | None:
    """Return what is wrong where these boxes (without empty ones) do not hold every element exactly
    once.

    The dims are cut independently of each other, so the boxes form a grid: it is enough that the
    distinct parts of each dim cover it once, and that every crossing is there.
    """
    if 0 in shape:
        return f"shape {list(shape)} has no elements, but ranks hold some" if boxes else None
    crossings = 1
    for dim, size in enumerate(shape):
        parts = {box[dim] for box in boxes}
        edge = 0
        for start, stop in sorted(run for part in parts for run in part):
            if start != edge or stop <= start:
                return f"dim {dim}: the pieces leave out or repeat what lies around {start}"
            edge = stop
        if edge != size:
            return f"dim {dim}: the pieces end at {edge}, the whole tensor at {size}"
        # each dim alone is covered by now: all crossings together are the whole
        crossings *= len(parts)
    if len(set(boxes)) != len(boxes) or len(boxes) != crossings:
        return f"{len(boxes)} pieces, but their cuts make {crossings}"
    return None


def _lengths(ranges: tuple[Ranges, ...]) -> tuple[int, ...]:
    return tuple(map(length_of, ranges))


def ranks_words(ranks: Iterable[int]) -> str:
    """Return "rank 3", "ranks 0, 2", bounded."""
    members = sorted(set(ranks))
    listed = ", ".join(map(str, members[:_MOST_RANKS]))
    more = f" and {len(members) - _MOST_RANKS} more" if len(members) > _MOST_RANKS else ""
    return f"rank{'s' if len(members) != 1 else ''} {listed or '(none)'}{more}"


def join_batches(
    mesh: Mesh, axes: Sequence[str], plans: Sequence[AssemblyPlan], dim: int = 0
) -> AssemblyPlan:
    """Return the plan of all data-parallel batches in one tensor, in rank order along the batch
    dim, the only one in which sizes may differ. Takes one plan per place along the data `axes` of
    the run's mesh, in any order. Raises LayoutError with the reason if these are no batches."""
    positions = [mesh.axes.index(axis) for axis in axes]
    by_place: dict[tuple[int, ...], AssemblyPlan] = {}
    for plan in plans:
        places = set()
        for rank in plan.ranks:
            # None stands for a rank outside of the mesh: it is no peer of anybody
            at = mesh.coordinate(rank)
            places.add(tuple(at[axis] for axis in positions) if at else None)
        place = places.pop()
        if places or place is None:
            raise LayoutError(
                f"{ranks_words(plan.ranks)} hold one value, but are not one data-parallel peer"
            )
        if place in by_place:
            holders = ranks_words({*by_place[place].ranks, *plan.ranks})
            raise LayoutError(f"{holders} are one data-parallel peer, but hold several values")
        by_place[place] = plan
    absent = [
        rank for at, rank in mesh.places() if tuple(at[axis] for axis in positions) not in by_place
    ]
    if absent:
        raise LayoutError(f"no batch was recorded on {ranks_words(absent)}")
    return _concatenated([by_place[place] for place in sorted(by_place)], dim)


def join_replicas(plans: Sequence[AssemblyPlan]) -> AssemblyPlan:
    """Join plans of rank sets that each hold the tensor. Raises LayoutError if cuts differ."""
    first = plans[0]
    parts = [{(box.ranges, box.reductions): box for box in plan.boxes} for plan in plans]
    for plan, boxes_here in zip(plans, parts):
        is_alike = plan.global_shape == first.global_shape and boxes_here.keys() == parts[0].keys()
        if not is_alike or any(
            len(boxes_here[key].summands) != len(box.summands) for key, box in parts[0].items()
        ):
            raise LayoutError(
                f"{ranks_words(plan.ranks)} and {ranks_words(first.ranks)} cut it differently"
            )
    boxes = tuple(
        replace(
            box,
            summands=tuple(
                tuple(sorted(itertools.chain.from_iterable(replicas)))
                for replicas in zip(*(boxes_here[key].summands for boxes_here in parts))
            ),
        )
        for key, box in parts[0].items()
    )
    return _joined_plan(plans, first.global_shape, boxes)


def _concatenated(plans: Sequence[AssemblyPlan], dim: int) -> AssemblyPlan:
    first = plans[0].global_shape
    for plan in plans:
        shape = plan.global_shape
        if dim >= len(shape):
            raise LayoutError(f"a value of shape {list(shape)} has no batch dim {dim}")
        if (shape[:dim], shape[dim + 1 :]) != (first[:dim], first[dim + 1 :]):
            raise LayoutError(
                f"batches of shapes {list(first)} and {list(shape)} differ beyond dim {dim}"
            )
    boxes: list[Box] = []
    offset = 0
    for plan in plans:
        for box in plan.boxes:
            moved = tuple((start + offset, stop + offset) for start, stop in box.ranges[dim])
            boxes.append(replace(box, ranges=(*box.ranges[:dim], moved, *box.ranges[dim + 1 :])))
        offset += plan.global_shape[dim]
    return _joined_plan(plans, (*first[:dim], offset, *first[dim + 1 :]), tuple(boxes))


def _joined_plan(
    plans: Sequence[AssemblyPlan], shape: tuple[int, ...], boxes: tuple[Box, ...]
) -> AssemblyPlan:
    return AssemblyPlan(
        global_shape=shape,
        boxes=boxes,
        ranks=tuple(sorted({rank for plan in plans for rank in plan.ranks})),
        missing=tuple(sorted({rank for plan in plans for rank in plan.missing})),
    )
