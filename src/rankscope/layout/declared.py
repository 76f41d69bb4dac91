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
"""In a mark: the last dim, however many dims there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMark:
    """How one parameter or activation of one rank lies along one axis, by a framework's word."""

    axis: str
    """"tp", "etp" (tensor parallelism of experts) or "fsdp"."""
    placement: Placement
    is_of_last_dim: bool = False
    members: Members | None = None
    """Ranks along the axis, where the framework names them too."""

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
    """Return the group of an axis that each rank belongs to, for ranks where it is certain. `cut`:
    of every cut parameter that is no constant {rank: hash of its shard at setup}."""
    groups_named = {group for groups in candidates.values() for group in groups if len(group) > 1}
    cut = list(cut)
    proven = {group for group in groups_named if _holds_parts(group, cut)}
    groups_of_rank = {
        rank: {g for g in groups if g in proven and rank in g}
        for rank, groups in candidates.items()
    }
    certain = {rank: groups.pop() for rank, groups in groups_of_rank.items() if len(groups) == 1}
    # a group is one only where all of its ranks take it for theirs
    return {r: g for r, g in certain.items() if all(certain.get(member) == g for member in g)}


def _holds_parts(group: Members, cut: Iterable[Mapping[int, int]]) -> bool:
    distinct = equal = 0
    for hashes in cut:
        values = [hashes[rank] for rank in group if rank in hashes]
        if len(values) > 1:
            is_apart = len(set(values)) == len(values) == len(group)
            distinct += is_apart
            equal += not is_apart
    return distinct > equal


_Coordinate = tuple[int, ...]
_Shape = tuple[int, ...]


def declared_pieces(
    mesh: Mesh,
    placements: Mapping[str, Placement],
    shapes: Mapping[int, Sequence[int]],
    source: LayoutSource = LayoutSource.DECLARED,
) -> dict[int, Piece]:
    """Return each rank's piece of a value with declared placements, for `plan_assemblies`, from
    {axis: placement} of the described axes and {rank: local shape} of every rank that recorded the
    value. If the local sizes of a row contradict its placements, its pieces carry the refusal.
    Raises LayoutError for an axis or a rank outside the mesh."""
    unknown = set(placements) - set(mesh.axes)
    if unknown:
        raise LayoutError(f"no axis {sorted(unknown)} among the declared axes {list(mesh.axes)}")
    outside = sorted(set(shapes) - set(mesh.ranks))
    if outside:
        raise LayoutError(f"rank {outside[0]} is not on the declared axes {list(mesh.axes)}")
    if not placements:
        layout = Layout(source=LayoutSource.UNKNOWN)
        return {rank: Piece(shape=tuple(shape), layout=layout) for rank, shape in shapes.items()}
    pieces: dict[int, Piece] = {}
    described = tuple(axis for axis in mesh.axes if axis in placements)
    extents = tuple(size for axis, size in zip(mesh.axes, mesh.shape) if axis in placements)
    for line in lines_along(mesh, described):  # one for each place along all other axes
        row = Mesh(axes=described, shape=extents, ranks=line)
        layout = Layout(
            source=source, mesh=row, placements=tuple(placements[axis] for axis in row.axes)
        )
        sizes = {rank: tuple(shapes[rank]) for rank in line if rank in shapes}
        try:
            pieces |= _pieces_of(layout, row, sizes)
        except LayoutError as error:
            lacking = Piece(shape=(), layout=layout, refusal=str(error))
            pieces |= {rank: replace(lacking, shape=size) for rank, size in sizes.items()}
    return pieces


def _pieces_of(layout: Layout, mesh: Mesh, sizes: Mapping[int, _Shape]) -> dict[int, Piece]:
    solid = [size for size in sizes.values() if 0 not in size] or [*sizes.values()]
    if len({*map(len, solid)}) > 1:
        raise LayoutError("the ranks hold values of different numbers of dims")
    count = max(map(len, solid), default=0)
    beyond = [p for p in layout.placements if p.dim is not None and p.dim >= count]
    if beyond and sizes:
        raise LayoutError(f"{beyond[0]} cannot cut a value of {count} dims")
    parts: list[dict[int, Ranges]] = []
    extents = []
    for dim in range(count):
        axes = [axis for axis, p in enumerate(layout.placements) if p.dim == dim]
        place_of = {rank: tuple(at[axis] for axis in axes) for at, rank in mesh.places()}
        offsets = _offsets(layout, mesh, axes, dim, _lengths(place_of, dim, sizes))
        parts.append({rank: offsets[place] for rank, place in place_of.items()})
        extents.append(sum(map(length_of, offsets.values())))
    return {
        rank: Piece(
            shape=size,
            layout=layout,
            global_shape=tuple(extents),
            ranges=tuple(ranges[rank] for ranges in parts),
        )
        for rank, size in sizes.items()
    }


def _lengths(
    place_of: Mapping[int, _Coordinate], dim: int, sizes: Mapping[int, _Shape]
) -> dict[_Coordinate, int]:
    """Return how much of a dim each place along its axes holds, according to its ranks' shapes. The
    shape of an empty piece counts only if there is no other."""
    members: dict[_Coordinate, list[int]] = {}
    for rank, place in place_of.items():
        members.setdefault(place, []).append(rank)
    lengths = {}
    for place, ranks in members.items():
        present = [sizes[rank] for rank in ranks if rank in sizes]
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
    layout: Layout, mesh: Mesh, axes: list[int], dim: int, lengths: Mapping[_Coordinate, int]
) -> dict[_Coordinate, Ranges]:
    if all(layout.placements[axis].kind is PlacementKind.SHARD for axis in axes):
        stops = itertools.accumulate(lengths.values())
        return {
            place: ((stop - length, stop),) if length else ()
            for (place, length), stop in zip(lengths.items(), stops)
        }
    total = sum(lengths.values())
    cuts = [replace(layout.placements[axis], dim=0) for axis in axes]
    extents = [mesh.shape[axis] for axis in axes]
    ranges = {place: global_ranges((total,), extents, place, cuts)[0] for place in lengths}
    expected = {place: length_of(part) for place, part in ranges.items()}
    if expected != lengths:
        raise LayoutError(
            f"dim {dim}: a strided shard of {total} is {list(expected.values())} long, "
            f"the ranks hold {list(lengths.values())}"
        )
    return ranges
