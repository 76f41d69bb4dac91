"""What may be inferred of ranks where no layout says it: which are replicas, which axes cut data.

No rank says that it is a replica or that its batch is its own. It is inferred, axis by axis, and
never taken for more than that:

* **Names.** An axis whose name says that it cuts sequences, layers or experts is no data axis,
  whatever else its name says (`dp_shard_cp`): context parallelism looks exactly like data
  parallelism, and its pieces do not lie behind each other along the batch dim.
* **Parameters** are replicas along an axis where DTensors say `Replicate()` or where plain ones
  were bitwise equal at setup on all ranks along it. Constants prove nothing (zeros are equal on
  tensor-parallel shards too), so one that is no constant must be among them. They are shards where
  *every* DTensor is cut along the axis and FSDP is around a module (tensor parallelism leaves norms
  and biases whole, and puts no wrapper around anything), or where FSDP1 made them flat.
* **Root inputs** tell data from everything else: along a data axis they differ, along a
  tensor-parallel one every rank is handed the same.

Plain data goes in and comes out; `rankscope check` and `--global` read it from a trace.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rankscope.layout.placement import Mesh, Placement, PlacementKind

_OWN_AXIS: Final = "data"
_WRAPPERS: Final = frozenset({"FSDP1", "FSDP2"})


class AxisName(str, enum.Enum):
    """The use of a mesh axis, by its name."""

    DATA = "data"
    NOT_DATA = "not data"
    """An axis that divides tensors, sequences, layers or experts instead of batches."""
    NOTHING = "nothing"


_NAMES: Final = {
    AxisName.NOT_DATA: "tp|sp|cp|pp|ep|tensor|sequence|seq|context|pipe|expert",
    AxisName.DATA: "dp|ddp|data|fsdp|hsdp|replicate|shard",
}
"""Words for a kind of axis, between underscores or before a digit; the first kind found counts."""
_PATTERNS: Final = {kind: re.compile(rf"(^|_)({words})(_|\d|$)") for kind, words in _NAMES.items()}


def named_as(axis: str) -> AxisName:
    """Return what an axis' name says: `dp_shard` is data, `tp0` is not, `dp_shard_cp` is not."""
    kinds = (kind for kind, words in _PATTERNS.items() if words.search(axis.lower()))
    return next(kinds, AxisName.NOTHING)


def lines_along(mesh: Mesh, axes: Collection[str]) -> list[tuple[int, ...]]:
    """Return the ranks along some axes in order of the mesh, for every place on the others."""
    other_axes = [at for at, axis in enumerate(mesh.axes) if axis not in axes]
    lines: dict[tuple[int, ...], list[int]] = {}
    for place, rank in mesh.places():
        lines.setdefault(tuple(place[at] for at in other_axes), []).append(rank)
    return [tuple(line) for line in lines.values()]


def flat_mesh(ranks: Iterable[int]) -> Mesh:
    """Return one axis, "data", over all of these ranks."""
    members = tuple(sorted(ranks))
    return Mesh(axes=(_OWN_AXIS,), shape=(len(members),), ranks=members)


def largest_mesh(parameters: Iterable[HeldParameter], ranks: frozenset[int]) -> Mesh:
    """Return the mesh with the most axes that parameters lie on, over all ranks: meshes that repeat
    it become one more axis in front, "data". A flat mesh without such parameters."""
    best: Mesh | None = None
    axis_count = 0  # axes of its own: one that a repetition makes tells less
    for parameter in parameters:
        if axis_count >= len(parameter.placements):
            continue
        family = [mesh for mesh in parameter.meshes if ranks.issuperset(mesh.ranks)]
        members = [rank for mesh in family for rank in mesh.ranks]
        if family and len(members) == len(set(members)) == len(ranks):
            best, axis_count = _stacked(family), len(parameter.placements)
    return best or flat_mesh(ranks)


def _stacked(family: Iterable[Mesh]) -> Mesh:
    rows = sorted(family, key=lambda mesh: min(mesh.ranks))
    first = rows[0]
    if len(rows) == 1:
        return first
    axis = _OWN_AXIS if _OWN_AXIS not in first.axes else f"{_OWN_AXIS}_outer"
    return Mesh(
        axes=(axis, *first.axes),
        shape=(len(rows), *first.shape),
        ranks=tuple(itertools.chain.from_iterable(mesh.ranks for mesh in rows)),
    )


class AxisUse(str, enum.Enum):
    """What parameters are to each other along an axis."""

    REPLICAS = "replicas"
    FSDP_SHARDS = "FSDP shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """One parameter over all its ranks, at setup."""

    placements: Mapping[str, Placement]
    """Placements by axis, from a DTensor; {} of a plain tensor: a declaration proves nothing."""
    meshes: Sequence[Mesh]
    """Meshes that the DTensor's own mesh may be."""
    prints: Mapping[int, Hashable]
    """Fingerprints of the ranks' values, where they were digested."""
    is_constant: bool
    """All elements of a rank are equal, so shards and replicas look the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFacts:
    """Facts about one axis; `use` is None if parameters are neither equal nor cut along it."""

    axis: str
    use: AxisUse | None
    has_other_inputs: bool

    @property
    def is_data(self) -> bool:
        """True where ranks along it are data-parallel peers."""
        is_named_otherwise = named_as(self.axis) is AxisName.NOT_DATA
        return self.has_other_inputs and self.use is not None and not is_named_otherwise


def axes_of(
    mesh: Mesh,
    parameters: Collection[HeldParameter],
    inputs: Sequence[Mapping[int, Hashable]],
    wrappers: Collection[str],
) -> list[AxisFacts]:
    """Return the facts about each axis of a mesh that has two ranks or more along it.

    Args:
        mesh: over all ranks in question.
        parameters: what these ranks held at setup.
        inputs: what tells the ranks' root inputs apart, one mapping by rank for each input.
        wrappers: words for what was put around modules: "FSDP2" ...
    """
    lines_of = {
        axis: lines_along(mesh, [axis]) for axis, size in zip(mesh.axes, mesh.shape) if size > 1
    }
    return [
        AxisFacts(
            axis=axis,
            use=_use_of(axis, lines, parameters, wrappers),
            has_other_inputs=any(differ_along(lines, prints) for prints in inputs),
        )
        for axis, lines in lines_of.items()
    ]


def differ_along(lines: Iterable[Iterable[int]], prints: Mapping[int, Hashable]) -> bool:
    """True if ranks along one line hold different values."""
    return any(len({prints[rank] for rank in line if rank in prints}) > 1 for line in lines)


def is_fsdp_axis(axis: str, placements: Iterable[Placement], mesh_axes: int) -> bool:
    """True for an axis that FSDP cut parameters along, or that its name says to be data's.

    `placements` are those of all DTensor parameters along it. Beside other axes of its mesh
    (`mesh_axes` of them), the name alone tells FSDP's.
    """
    axis_name = named_as(axis)
    if axis_name is not AxisName.NOTHING:
        return axis_name is AxisName.DATA
    return mesh_axes == 1 and all(placement.dim is not None for placement in placements)


def _use_of(
    axis: str,
    lines: Iterable[Sequence[int]],
    parameters: Iterable[HeldParameter],
    wrappers: Collection[str],
) -> AxisUse | None:
    copies = cut = proofs = 0
    for parameter in parameters:
        placement = parameter.placements.get(axis)
        if placement is not None:
            if placement.dim is not None:
                cut += 1
            elif placement.kind is PlacementKind.REPLICATE:
                copies += 1
                proofs += 1
            else:
                return None
            continue
        different = sum(differ_along([line], parameter.prints) for line in lines)
        # plain values that differ are no replicas; FSDP1 alone makes plain parameters shards
        if different and "FSDP1" not in wrappers:
            return None
        cut += different
        proofs += not parameter.is_constant
    if cut:
        return AxisUse.FSDP_SHARDS if not copies and not _WRAPPERS.isdisjoint(wrappers) else None
    return AxisUse.REPLICAS if proofs else None
