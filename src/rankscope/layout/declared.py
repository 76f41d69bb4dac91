"""How plain tensors lie that a user declared or a framework marked, from plain data alone.

A declared layout says along which axes a value is cut, not where: ranks of a "tp" axis that hold 3,
3 and 2 columns of a value declared ``tp = "Shard(1)"`` hold columns 0-2, 3-5 and 6-7. Along axes
that the declaration leaves out lie different values: every row of the described axes is a mesh of
its own.

Megatron marks a weight that it cut with `tensor_model_parallel` and `partition_dim`: which dim is
cut, not between which ranks. The ranks are looked for where the module names its process group,
where a group of the job is described as the axis' own, or among the groups of the collectives that
modules with cut parameters issue. Such a group is believed where its ranks held different values of
most cut parameters when training began. transformers' `tp_plan` names the ranks. The marks are read
in `capture/describe.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope.errors import LayoutError
from rankscope.layout.infer import lines_along
from rankscope.layout.placement import (
    Layout,
    LayoutSource,
    Mesh,
    PieceKind,
    Placement,
    PlacementKind,
    Ranges,
    global_ranges,
    length_of,
)
from rankscope.layout.plan import Piece, ranks_words

Members = tuple[int, ...]
"""Global ranks in the order of their group."""

AXIS_GROUPS: Final[Mapping[str, str]] = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP",
}
"""How Megatron describes the process group of an axis."""
FSDP1_AXIS: Final = "fsdp"
LAST_DIM: Final = "Shard(-1)"
"""Stands in a mark for a cut of the last dim, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMark:
    """What a framework says of one parameter or activation of one rank."""

    axis: str
    """Name of the axis it speaks of: "tp", "etp" (tensor parallelism of experts), "fsdp"."""
    placement: Placement
    is_of_last_dim: bool = False
    members: Members | None = None
    """Ranks along the axis, where the framework says that too."""

    @property
    def is_cut(self) -> bool:
        """True where each rank of the axis holds another part."""
        return self.placement.pieces is PieceKind.SLICES

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of its definition in a spool."""
        members = None if self.members is None else list(self.members)
        placement = LAST_DIM if self.is_of_last_dim else str(self.placement)
        return {"axis": self.axis, "placement": placement, "members": members}

    def placed(self, dims: int) -> Placement:
        """Return how a value of so many dims lies."""
        if not self.is_of_last_dim:
            return self.placement
        return replace(self.placement, dim=max(dims - 1, 0))


def believed_groups(
    candidates: Mapping[int, Collection[Members]], cut: Iterable[Mapping[int, int]]
) -> dict[int, Members]:
    """Return the group of an axis that each rank belongs to, of those ranks where it is certain.

    Args:
        candidates: {rank: groups it may be}.
        cut: of every cut parameter that is no constant {rank: hash of what it held at setup}.
    """
    every = {group for groups in candidates.values() for group in groups if len(group) > 1}
    cut = list(cut)
    proven = {group for group in every if _holds_parts(group, cut)}
    own = {
        rank: {g for g in groups if g in proven and rank in g}
        for rank, groups in candidates.items()
    }
    found = {rank: groups.pop() for rank, groups in own.items() if len(groups) == 1}
    # a group is one only where all of its ranks take it for theirs
    return {r: g for r, g in found.items() if all(found.get(member) == g for member in g)}


def _holds_parts(group: Members, cut: Iterable[Mapping[int, int]]) -> bool:
    apart = alike = 0
    for hashes in cut:
        held = [hashes[rank] for rank in group if rank in hashes]
        if len(held) > 1:
            is_apart = len(set(held)) == len(held) == len(group)
            apart += is_apart
            alike += not is_apart
    return apart > alike


_Coordinate = tuple[int, ...]
_Shape = tuple[int, ...]


def declared_pieces(
    mesh: Mesh,
    placements: Mapping[str, Placement],
    shapes: Mapping[int, Sequence[int]],
    source: LayoutSource = LayoutSource.DECLARED,
) -> dict[int, Piece]:
    """Return each rank's piece of the value declared to lie so, for `plan_assemblies`.

    Where the local sizes of a row contradict its placements, its pieces carry the refusal.

    Args:
        mesh: the declared axes over all ranks.
        placements: {axis: placement} of the axes that are described.
        shapes: {rank: local shape} of every rank that recorded the value.

    Raises:
        LayoutError: an axis or a rank that the mesh does not have.
    """
    unknown = set(placements) - set(mesh.axes)
    if unknown:
        raise LayoutError(f"no axis {sorted(unknown)} among the declared axes {list(mesh.axes)}")
    outside = sorted(set(shapes) - set(mesh.ranks))
    if outside:
        raise LayoutError(f"rank {outside[0]} is not on the declared axes {list(mesh.axes)}")
    held = {rank: tuple(shape) for rank, shape in shapes.items()}
    if not placements:
        layout = Layout(source=LayoutSource.UNKNOWN)
        return {rank: Piece(shape=shape, layout=layout) for rank, shape in held.items()}
    pieces: dict[int, Piece] = {}
    described = tuple(axis for axis in mesh.axes if axis in placements)
    extents = tuple(size for axis, size in zip(mesh.axes, mesh.shape) if axis in placements)
    for line in lines_along(mesh, described):  # one for each place along all other axes
        row = Mesh(axes=described, shape=extents, ranks=line)
        layout = Layout(
            source=source, mesh=row, placements=tuple(placements[axis] for axis in row.axes)
        )
        pieces |= _pieces_of(layout, row, {r: held[r] for r in row.ranks if r in held})
    return pieces


def _pieces_of(layout: Layout, mesh: Mesh, held: Mapping[int, _Shape]) -> dict[int, Piece]:
    try:
        found = _places(layout, mesh, held)
    except LayoutError as error:
        return {r: Piece(shape=s, layout=layout, refusal=str(error)) for r, s in held.items()}
    whole = tuple(sum(map(length_of, dim.values())) for dim in found)
    at_rank = {rank: at for at, rank in mesh.places()}
    return {
        rank: Piece(
            shape=shape,
            layout=layout,
            global_shape=whole,
            ranges=tuple(
                parts[tuple(at_rank[rank][axis] for axis in _cutting(layout, dim))]
                for dim, parts in enumerate(found)
            ),
        )
        for rank, shape in held.items()
    }


def _places(
    layout: Layout, mesh: Mesh, held: Mapping[int, _Shape]
) -> list[dict[_Coordinate, Ranges]]:
    solid = [shape for shape in held.values() if 0 not in shape] or list(held.values())
    dims = {len(shape) for shape in solid}
    if len(dims) > 1:
        raise LayoutError("the ranks hold values of different numbers of dims")
    count = max(dims, default=0)
    beyond = [p for p in layout.placements if p.dim is not None and p.dim >= count]
    if beyond and held:
        raise LayoutError(f"{beyond[0]} cannot cut a value of {count} dims")
    return [_offsets(layout, mesh, dim, _lengths(layout, mesh, dim, held)) for dim in range(count)]


def _lengths(
    layout: Layout, mesh: Mesh, dim: int, held: Mapping[int, _Shape]
) -> dict[_Coordinate, int]:
    """Return how much of a dim each place along its axes holds, as its ranks' shapes say. The shape
    of an empty piece counts only where there is no other."""
    members: dict[_Coordinate, list[int]] = {}
    for at, rank in mesh.places():
        members.setdefault(tuple(at[a] for a in _cutting(layout, dim)), []).append(rank)
    lengths = {}
    for place, ranks in members.items():
        present = [held[rank] for rank in ranks if rank in held]
        if not present:
            raise LayoutError(
                f"{ranks_words(ranks)} recorded nothing, so what others hold has no offset"
            )
        solid = {shape[dim] for shape in present if 0 not in shape}
        if len(solid) > 1:
            raise LayoutError(
                f"ranks that should hold the same part of dim {dim} hold {sorted(solid)} of it"
            )
        stated = solid or {shape[dim] for shape in present if len(shape) > dim}
        lengths[place] = max(stated, default=0)
    return lengths


def _offsets(
    layout: Layout, mesh: Mesh, dim: int, lengths: Mapping[_Coordinate, int]
) -> dict[_Coordinate, Ranges]:
    axes = _cutting(layout, dim)
    if all(layout.placements[axis].kind is PlacementKind.SHARD for axis in axes):
        stops = itertools.accumulate(lengths.values())
        return {
            place: ((stop - length, stop),) if length else ()
            for (place, length), stop in zip(lengths.items(), stops)
        }
    total = sum(lengths.values())
    cuts = [replace(layout.placements[axis], dim=0) for axis in axes]
    extents = [mesh.shape[axis] for axis in axes]
    found = {place: global_ranges((total,), extents, place, cuts)[0] for place in lengths}
    wanted = {place: length_of(part) for place, part in found.items()}
    if wanted != lengths:
        raise LayoutError(
            f"dim {dim}: a strided shard of {total} is {list(wanted.values())} long, "
            f"the ranks hold {list(lengths.values())}"
        )
    return found


def _cutting(layout: Layout, dim: int) -> list[int]:
    return [axis for axis, placement in enumerate(layout.placements) if placement.dim == dim]
