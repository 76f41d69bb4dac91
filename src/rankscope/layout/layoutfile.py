"""Declared layouts: the TOML file in which a user says how tensors lie that no DTensor describes,
and where their pieces lie by it.

    axes = "dp=1,tp=2"                 # row-major over the ranks
    [[layout]]
    path = "layers.*.attn.o_proj"      # fnmatch on the canonical path
    slot = "output"                    # input, output: every slot of that kind; param:<name> ...
    placements = { tp = "Replicate()" }

    [[layout]]
    path = "personal_head"
    slot = "param:*"
    own = true                         # another one on each rank, on purpose: held to no other rank

An axis that no entry names for a slot is not described there. Several entries may describe one slot
together; two that place it differently along one axis contradict each other, and both are named.

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
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from rankscope.errors import LayoutError, os_errors_as
from rankscope.globs import glob_matches, slot_matches
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
    parse_placement,
)
from rankscope.layout.plan import Piece, ranks_words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIZE = re.compile(r"[1-9][0-9]{0,8}")
_KEYS: Final = (frozenset({"path", "slot", "placements"}), frozenset({"path", "slot", "own"}))
_KINDS: Final = ("input", "output")
_MOST_BYTES: Final = 1 << 20


def described_as(slot: str) -> str:
    """Return `param:` and input or output for the slot of a gradient; any other slot is its own."""
    if slot.startswith("grad:"):
        return f"param:{slot[5:]}"
    return slot.removeprefix("grad_") if slot.startswith(("grad_input", "grad_output")) else slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEntry:
    """One `[[layout]]`."""

    number: int
    path: str
    slot: str
    placements: Mapping[str, Placement]
    is_own: bool = False
    """Each rank has another one on purpose."""

    def describes(self, path: str, slot: str) -> bool:
        """True where the entry describes this slot of this path."""
        if not glob_matches(self.path, path):
            return False
        if self.slot in _KINDS:
            return described_as(slot).split(".")[0] == self.slot
        return slot_matches(self.slot, slot)

    def __str__(self) -> str:
        listed = ", ".join(f"{axis} = {place}" for axis, place in self.placements.items())
        return f"entry {self.number} (path {self.path!r}, slot {self.slot!r}: {listed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFile:
    """The declarations of one file."""

    name: str
    text: str
    axes: Mapping[str, int]
    entries: tuple[LayoutEntry, ...]

    @classmethod
    def load(cls, path: Path) -> LayoutFile:
        """Read a file. Raises LayoutError with the place of the fault."""
        trouble = os_errors_as(LayoutError, f"layout file {path}: cannot be read")
        with trouble, path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise LayoutError(f"layout file {path}: is larger than {_MOST_BYTES} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise LayoutError(f"layout file {path}: is not UTF-8 text: {error}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "layout") -> LayoutFile:
        """Read a file's text. Raises LayoutError with the name of the faulty entry."""
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # its own error is a ValueError
            raise LayoutError(f"layout file {name}: is not TOML: {error}") from error
        unknown = sorted(set(content) - {"axes", "layout"})
        if unknown:
            raise LayoutError(
                f"layout file {name}: no key {unknown[0]!r} is known; write axes and [[layout]]"
            )
        axes = _axes(content.get("axes"), name)
        listed = content.get("layout", [])
        if not isinstance(listed, list):
            raise LayoutError(f"layout file {name}: write [[layout]] with two brackets")
        entries = tuple(
            _entry(number, table, axes, f"layout file {name}: entry {number}")
            for number, table in enumerate(listed, 1)
        )
        return cls(name=name, text=text, axes=axes, entries=entries)

    @property
    def size(self) -> int:
        """How many ranks the axes are for."""
        return prod(self.axes.values())

    def mesh(self, world_size: int) -> Mesh:
        """Return the declared axes over all ranks. Raises LayoutError for a run of another size."""
        if self.size != world_size:
            listed = ",".join(f"{axis}={extent}" for axis, extent in self.axes.items())
            raise LayoutError(
                f"layout file {self.name}: axes {listed} are those of {self.size} ranks, the run "
                f"had {world_size}"
            )
        return Mesh(
            axes=tuple(self.axes), shape=tuple(self.axes.values()), ranks=tuple(range(world_size))
        )

    def placements(self, path: str, slot: str) -> dict[str, Placement]:
        """Return {axis: placement} of a slot, {} if no entry describes it. Raises LayoutError with
        both names if two entries place it differently."""
        by_axis: dict[str, tuple[Placement, LayoutEntry]] = {}
        for entry in self.entries:
            if not entry.describes(path, slot):
                continue
            for axis, placement in entry.placements.items():
                first = by_axis.setdefault(axis, (placement, entry))
                if first[0] != placement:
                    raise LayoutError(
                        f"layout file {self.name}: {first[1]} and {entry} give "
                        f"{path or '(root)'}:{slot} different placements along {axis}"
                    )
        return {axis: placement for axis, (placement, _) in by_axis.items()}

    def is_own(self, path: str, slot: str) -> bool:
        """True where each rank has another one on purpose: a gradient as its parameter."""
        owned = [entry for entry in self.entries if entry.is_own]
        slots = {slot, described_as(slot)}
        return any(entry.describes(path, name) for entry in owned for name in slots)


def _axes(text: object, name: str) -> dict[str, int]:
    message = f'layout file {name}: axes = {text!r}: write axes = "dp=1,tp=2", outermost first'
    if not isinstance(text, str):
        raise LayoutError(message)
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not axis or not _SIZE.fullmatch(size) or axis in axes:
            raise LayoutError(message)
        axes[axis] = int(size)
    return axes


def _entry(number: int, data: Any, axes: Mapping[str, int], where: str) -> LayoutEntry:
    if not isinstance(data, dict) or set(data) not in _KEYS:
        keys = ", ".join(sorted(data)) if isinstance(data, dict) else data
        raise LayoutError(
            f"{where} has {keys or 'nothing'}: write path, slot and placements, or own = true"
        )
    path, slot, texts = data["path"], data["slot"], data.get("placements")
    if not isinstance(path, str) or not isinstance(slot, str):
        raise LayoutError(f"{where}: path and slot are texts")
    path = "" if path == "(root)" else path
    if "own" in data:
        if data["own"] is not True:
            raise LayoutError(f"{where}: own can only be true")
        return LayoutEntry(number=number, path=path, slot=slot, placements={}, is_own=True)
    if not isinstance(texts, dict) or not texts:
        raise LayoutError(f'{where}: write placements = {{ tp = "Replicate()" }}')
    placements = {}
    for axis, text in texts.items():
        if axis not in axes:
            raise LayoutError(f"{where}: no axis {axis!r} among {', '.join(axes)}")
        try:
            placement = parse_placement(text) if isinstance(text, str) else None
        except LayoutError as error:
            raise LayoutError(f"{where}: {axis} = {text!r}: {error}") from error
        if placement is None or placement.kind is PlacementKind.OTHER:
            raise LayoutError(
                f"{where}: {axis} = {text!r} is not a placement: write Replicate(), Shard(0), "
                f"StridedShard(0, split_factor=2) or Partial(sum)"
            )
        placements[axis] = placement
    return LayoutEntry(number=number, path=path, slot=slot, placements=placements)


def layout_of_run(run: Mapping[str, Any]) -> tuple[LayoutFile, Mesh] | str | None:
    """Return the layout file in a run header with its axes over all ranks; a text if it is
    unusable, or None without a file (or with one rank, which holds everything whole)."""
    declared = run.get("layout")
    if declared is None or int(run["world_size"]) < 2:
        return None
    try:
        layouts = LayoutFile.parse(str(declared["text"]), str(declared["file"]))
        return layouts, layouts.mesh(int(run["world_size"]))
    except LayoutError as error:
        return f"{error}; it is not used"


# ---- where declared pieces lie -------------------------------------------------------------------

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
