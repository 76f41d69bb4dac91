"""How values lie that no layout describes, from plain data that `rankscope check`, `rankscope
layout` and `--global` read from a trace.

**Which ranks are replicas, which axes cut data.** No rank says that it is a replica or that its
batch is its own. It is inferred, axis by axis, and never taken for more than that:

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

**The one proof, from all values of a run.** What a run shows is noted value by value, in
`ShownValues`. `Proof` draws from it, axis by axis:

* **Equal bytes.** A value whose bytes are equal on all ranks along an axis is whole there.
* **Cut weights.** Where a DTensor that is cut along an axis is the weight of a Linear or Embedding,
  and the last dim of what goes in or comes out is on every rank as long as that rank's part of the
  weight, that dim is cut as well.
* **Twins.** A value that holds on every rank the bytes of one that is known, or of a DTensor's
  parts, lies as that does.
* **Through modules.** A module that works on each place by itself hands out what lies as its input.

Constants prove nothing by being equal, nor do twins of a few elements. `rankscope layout` notes all
steps of a trace, and adds what collectives suggest; the debugger and `--global` note one step.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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


# ---- the proof -----------------------------------------------------------------------------------

SlotKey = tuple[str, str]
"""(call, slot). The call is a path, with a suffix where several calls have one path."""
Shape = tuple[int, ...]
WHOLE: Final = Placement(kind=PlacementKind.REPLICATE)
_FEWEST: Final = 8  # elements of a twin: fewer may be equal by accident
_LAST_DIM: Final = {("Linear", 0): "output", ("Linear", 1): "input", ("Embedding", 1): "output"}
"""Class, dim of its weight -> slots whose last dim is as long."""


def cut(dim: int) -> Placement:
    """Return the placement of what is cut along a dim."""
    return Placement(kind=PlacementKind.SHARD, dim=dim)


def may_be_cut(axis: str, *, is_fsdp: bool) -> bool:
    """True if parameters cut along an axis are used in computations as they lie: FSDP gathers them
    first, so in its jobs only along an axis whose name is not data's."""
    return not is_fsdp or named_as(axis) is AxisName.NOT_DATA


class Claim(NamedTuple):
    """A placement of a value along one axis, and the reason."""

    placement: Placement
    reason: str
    length: int = 0
    """Length of the cut dim of the whole; 0 where the ranks' shapes alone give it."""


@dataclass(slots=True)
class SlotFacts:
    """Numbers of a slot's records in which all ranks along one axis held the same bytes (and not a
    constant), some did not, and no two did."""

    equal: int = 0
    unequal: int = 0
    distinct: int = 0


@dataclass(slots=True)
class ShownValues:
    """What a run shows about its values."""

    lines: Mapping[str, Sequence[tuple[int, ...]]]
    """{axis: the ranks along it, for every place on the others}"""
    facts: dict[tuple[SlotKey, str], SlotFacts] = field(default_factory=dict)
    shapes: dict[SlotKey, tuple[Shape, ...]] = field(default_factory=dict)
    """Local shapes: one for all ranks, or one per rank in their order."""
    parameters: dict[str, set[SlotKey]] = field(default_factory=dict)
    """{path: parameters of the module itself}"""
    placed: dict[tuple[SlotKey, str], Claim] = field(default_factory=dict)
    """Placements of parameters that are DTensors, along axes that cut them."""
    twins: dict[Hashable, dict[SlotKey, None]] = field(default_factory=dict)
    """Slots that held the same bytes on every rank, in order."""
    modules: dict[str, tuple[str, str]] = field(default_factory=dict)
    """{call in forward: path and class of its module}"""
    issued: dict[tuple[str, str], set[tuple[str, str]]] = field(default_factory=dict)
    """{(call, axis): {(issuer, op)}}"""
    inner: dict[str, set[str]] = field(default_factory=dict)
    """{call: the calls inside it}"""

    def note(
        self,
        key: SlotKey,
        sizes: Mapping[int, Shape],
        prints: Mapping[int, Hashable],
        is_near: Callable[[Sequence[tuple[int, ...]]], bool] = lambda lines: False,
        *,
        is_twin: bool = False,
    ) -> None:
        """Add a record of a value: its shapes, and along which axes its bytes are the same.

        Args:
            sizes: local shape of every rank that held it.
            prints: what tells the ranks' bytes apart; {} for constants.
            is_near: True where the ranks of some lines differ by rounding alone.
            is_twin: others that hold the same bytes on every rank lie as it does.
        """
        if key not in self.shapes:
            self.note_shapes(key, sizes)
        for axis, lines in self.lines.items():
            facts = self.facts.setdefault((key, axis), SlotFacts())
            held_prints = [[prints.get(rank) for rank in line if rank in sizes] for line in lines]
            if max(map(len, held_prints)) < 2 or any(None in line for line in held_prints):
                continue
            is_same = all(len({*line}) == 1 for line in held_prints if line)
            facts.equal += is_same
            facts.unequal += not is_same and not is_near(lines)
            facts.distinct += all(len({*line}) == len(line) for line in held_prints)
        if is_twin and prints and all(math.prod(shape) >= _FEWEST for shape in self.shapes[key]):
            self.twins.setdefault(tuple(sorted(prints.items())), {})[key] = None

    def note_shapes(self, key: SlotKey, sizes: Mapping[int, Shape]) -> None:
        """Keep the local shapes of a value."""
        shapes = tuple(sizes[rank] for rank in sorted(sizes))
        self.shapes[key] = shapes[:1] if len({*shapes}) == 1 else shapes
        if key[1].startswith("param:"):
            self.parameters.setdefault(key[0], set()).add(key)

    def note_cut(
        self, key: SlotKey, axis: str, placement: Placement, sizes: Mapping[int, Shape], full: Shape
    ) -> None:
        """Keep a parameter that is a DTensor and cut along an axis, unless a rank holds all."""
        if placement.kind is not PlacementKind.SHARD or (dim := placement.dim) is None:
            return
        if all(dim < len(size) and size[dim] < full[dim] for size in sizes.values()):
            self.note_shapes(key, sizes)
            self.placed[key, axis] = Claim(placement, "as its DTensor says", full[dim])

    def shape(self, key: SlotKey) -> Shape:
        """Return the local shape of a value, () where ranks differ in it."""
        shapes = self.shapes.get(key, ())
        return shapes[0] if len(shapes) == 1 else ()


class Proof:
    """How values lie, as far as what is shown proves it."""

    def __init__(self, values: ShownValues) -> None:
        self.shown = values
        self.known: dict[tuple[SlotKey, str], Claim] = {**values.placed}
        self._refused: set[tuple[SlotKey, str]] = set()
        for (key, axis), facts in values.facts.items():
            if facts.equal and not facts.unequal:
                text = f"the same bytes on all ranks in {facts.equal} of {facts.equal} records"
                self.say(key, axis, Claim(WHOLE, text))
        for axis in values.lines:
            for call in values.modules:
                self.read_module(call, axis)
            self.conclude_axis(axis)
        while self._travel():
            pass

    def conclude_axis(self, axis: str) -> None:
        """Say what follows along an axis from all modules together: here, nothing."""

    def read_module(self, call: str, axis: str) -> None:
        """Place a module's input and output if its weight is a cut DTensor."""
        path, class_name = self.shown.modules[call]
        placed = self.shown.placed.get(((path, "param:weight"), axis))
        if placed is not None:
            dim = placed.placement.dim or 0
            if (class_name, dim) in _LAST_DIM:
                self.say_last(call, _LAST_DIM[class_name, dim], axis, dim, placed.length)

    def say_last(self, call: str, kind: str, axis: str, dim: int, length: int = 0) -> None:
        """Claim that the last dim of the only slot of a kind is cut, if on every rank it is as long
        as a dim of the weight that has this length on all ranks."""
        key, path = self.key(call, kind), self.shown.modules[call][0]
        weight = self.shown.shapes.get((path, "param:weight"), ())
        shapes = self.shown.shapes[key] if key else ()
        if key and [size[-1:] for size in shapes] == [size[dim : dim + 1] for size in weight]:
            text = f"as long as this rank's {'columns' if dim else 'rows'} of the weight"
            self.say(key, axis, Claim(cut(len(shapes[0]) - 1), text, length))

    def say(self, key: SlotKey, axis: str, claim: Claim) -> bool:
        """Keep a claim unless another one contradicts it; True if it is new."""
        place = (key, axis)
        if place in self._refused or place in self.shown.placed:
            return False
        earlier = self.known.get(place)
        if earlier is not None:
            if earlier.placement != claim.placement:
                # two answers are no answer, and no third one decides between them
                del self.known[place]
                self._refused.add(place)
            return False
        facts = self.shown.facts.get(place)
        if facts is None or (facts.unequal if claim.placement == WHOLE else facts.equal):
            return False
        self.known[place] = claim
        return True

    def is_whole(self, key: SlotKey, axis: str) -> bool:
        """True for a value that is known to be the same on all ranks along an axis."""
        claim = self.known.get((key, axis))
        return claim is not None and claim.placement == WHOLE

    def key(self, call: str, kind: str) -> SlotKey | None:
        """Return the only slot of a kind that a call has."""
        names = (kind, f"{kind}.0", f"{kind}.{kind}")  # the last: handed over by keyword
        keys = [key for name in names if (key := (call, name)) in self.shown.shapes]
        more = (call, f"{kind}.1") in self.shown.shapes
        return keys[0] if len(keys) == 1 and not more else None

    def _travel(self) -> bool:
        """Carry placements to slots of the same bytes, and through modules that keep the shape."""
        is_new, shapes = False, self.shown.shapes
        for keys in self.shown.twins.values():
            for axis in self.shown.lines:
                claims = {key: self.known[key, axis] for key in keys if (key, axis) in self.known}
                sources = {(shapes[key][0], claim.placement): key for key, claim in claims.items()}
                for key in keys if sources else ():
                    carried = {_as_laid(claims[source], shapes[source][0], shapes[key][0], source)
                             for source in sources.values()}  # fmt: skip
                    if len(carried) == 1 and (laid := carried.pop()) is not None:
                        is_new |= self.say(key, axis, laid)
        for call in self.shown.modules:
            for axis in self.shown.lines:
                is_new |= self._through(call, axis)
        return is_new

    def _through(self, call: str, axis: str) -> bool:
        before_key, after_key = self.key(call, "input"), self.key(call, "output")
        if not before_key or not after_key or (call, axis) in self.shown.issued:
            return False
        before, after = self.shown.shapes[before_key], self.shown.shapes[after_key]
        is_even = len(before) == len(after) == 1
        parameters = self.shown.parameters.get(self.shown.modules[call][0], ())
        is_new = False
        for source, target in ((before_key, after_key), (after_key, before_key)):
            claim = self.known.get((source, axis))
            dim = None if claim is None else claim.placement.dim
            if claim is None or dim is None:
                continue
            if call in self.shown.inner:
                is_through = (
                    source is before_key and before == after and self._is_residual(call, axis, dim)
                )
                text = "of the input's shape, as what the modules inside hand out is"
            elif not parameters:
                is_through = before == after
                text = f"as {source[1]}, of the same shape: the module has no weights"
            else:
                is_whole = all(self.is_whole(key, axis) for key in parameters)
                is_through = is_even and is_whole and _is_by_row(before[0], after[0], dim)
                text = f"as {source[1]}: every rank has the same weights"
            if is_through:
                is_new |= self.say(target, axis, claim._replace(reason=text))
        return is_new

    def _is_residual(self, call: str, axis: str, dim: int) -> bool:
        """True if modules inside return values cut along this dim, of the shape of the module's
        output, and none returns another value of that shape."""
        shapes = self.shown.shapes
        keys = [self.key(child, "output") for child in self.shown.inner[call]]
        after = self.key(call, "output")
        peers = [key for key in keys if key and after and shapes[key] == shapes[after]]
        claims = [self.known.get((key, axis)) for key in peers]
        return bool(claims) and all(
            claim is not None and claim.placement.dim == dim for claim in claims
        )


def _is_by_row(before: Shape, after: Shape, dim: int) -> bool:
    """True where a module may turn each row into one, and `dim` is not that of its columns."""
    is_last = before[:-1] == after[:-1] and dim == len(before) - 1
    is_row = before == after[: len(before)] or before[:-1] == after[:-1]
    return is_row and dim < min(len(before), len(after) - 1) and not is_last


def _as_laid(
    claim: Claim, source_shape: Shape, target_shape: Shape, source: SlotKey
) -> Claim | None:
    """Return the placement of a known value's bytes in another shape; None if several dims of it
    may be the cut one, because one element's bytes may then have lain elsewhere."""
    reason, dim = f"the same bytes as {source[0] or '(root)'}:{source[1]}", claim.placement.dim
    if dim is None or source_shape == target_shape:
        return claim._replace(reason=reason)
    before = math.prod(source_shape[:dim])
    dims = [at for at in range(len(target_shape)) if math.prod(target_shape[:at]) == before]
    if not dims or 1 in target_shape:
        return None
    return Claim(cut(dims[0]), reason, claim.length * target_shape[dims[0]] // source_shape[dim])
