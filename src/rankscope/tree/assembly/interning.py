"""Definitions of all ranks under common numbers: modules, slots, value descriptions, meshes.

Every rank numbers its own definitions. Here equal ones get one number for the whole trace, so that
columns of different ranks can be compared as integers.

Roots get names on which all ranks agree. The largest root of a rank (or the one the user named) is
"", others are "@ClassName", "@ClassName.2" in order of first call. A root that is smaller than
another on some rank is named by its class on every rank, and numbers are given over all ranks,
lowest rank first. A module that was called as a root, and later turned out to live inside another,
takes its path there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import LayoutError
from rankscope.layout.layoutfile import LAST_DIM, LayoutMark
from rankscope.layout.placement import Layout, LayoutSource, Mesh, PieceKind, parse_placement
from rankscope.layout.plan import Piece
from rankscope.record.ranks import Collective
from rankscope.record.value import ModuleName, TensorFacts
from rankscope.tree.assembly.rankstreams import RankStream


@dataclass(frozen=True, slots=True, kw_only=True)
class RootDefinition:
    """A root definition of one stream."""

    number: int
    """Of its definition; definitions come in order of first call."""
    class_name: str
    parameters: int
    """Elements of its parameters, DTensors by their global shape."""
    is_preferred: bool = False
    """The user named it as the root: it is taken for the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRoots:
    """The roots of one stream, and which of them live inside another."""

    roots: tuple[RootDefinition, ...]
    inside: Mapping[int, tuple[int, str]]
    """Root -> (the root that contains it, its path there)."""


def join_path(*parts: str) -> str:
    """Return module path parts joined by dots, empty ones left out."""
    return ".".join(part for part in parts if part)


def name_roots(streams: Sequence[StreamRoots]) -> list[dict[int, str]]:
    """Return, per stream, {root definition: path of that root}; lowest rank first in `streams`."""
    outer = [[r for r in s.roots if r.number not in s.inside] for s in streams]
    tops = [max(roots, key=_size, default=None) for roots in outer]
    minor = {
        _signature(root)
        for roots, top in zip(outer, tops)
        for root in roots
        if top is not None and root.number != top.number and _signature(root) != _signature(top)
    }
    numbers: dict[str, dict[tuple[int, int], int]] = {}
    names: list[dict[int, str]] = []
    for stream, roots, top in zip(streams, outer, tops):
        named: dict[int, str] = {}
        counts: Counter[tuple[str, int]] = Counter()
        for root in sorted(roots, key=lambda r: r.number):
            if root is top and (root.is_preferred or _signature(root) not in minor):
                named[root.number] = ""
                continue
            of_class = numbers.setdefault(root.class_name, {})
            key = (root.parameters, counts[_signature(root)])
            counts[_signature(root)] += 1
            number = of_class.setdefault(key, len(of_class) + 1)
            named[root.number] = f"@{root.class_name}" + (f".{number}" if number > 1 else "")
        for number in stream.inside:
            named[number] = _inside_path(number, stream.inside, named)
        names.append(named)
    return names


def _size(root: RootDefinition) -> tuple[bool, int, int]:
    return root.is_preferred, root.parameters, -root.number


def _signature(root: RootDefinition) -> tuple[str, int]:
    return root.class_name, root.parameters


def _inside_path(
    number: int, inside: Mapping[int, tuple[int, str]], named: Mapping[int, str]
) -> str:
    path, visited = "", set[int]()
    while number in inside and number not in visited:
        visited.add(number)
        number, place = inside[number]
        path = join_path(place, path)
    return join_path(named.get(number, ""), path)


T = TypeVar("T", bound=Hashable)


class Interned(Generic[T]):
    """Distinct items by number, in order of first sight."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, item: T) -> int:
        """Return the number of an item, a new one on first sight."""
        number = self._numbers.setdefault(item, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFamily:
    """Meshes of the same axes and shape over different ranks: the tp meshes of each dp row."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    source: LayoutSource = LayoutSource.DTENSOR
    """Where its axes stand: DeviceMeshes of the same axes may be over other ranks than those of a
    layout file or of marks."""

    @property
    def name(self) -> str:
        """How layouts refer to it: "dp=2,tp=2", "declared:tp=2", "marked:tp=2"."""
        listed = ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape))
        return f"{self.source.value}:{listed}" if self.source.is_from_all_ranks else listed

    def listed(self, over: Iterable[tuple[int, ...]], device: str = "") -> dict[str, Any]:
        """Return its meshes over these ranks as the run header lists them."""
        return {
            "name": self.name,
            "axes": list(self.axes),
            "shape": list(self.shape),
            "device": device,
            "over": [list(ranks) for ranks in sorted(over)],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a value is, without its numbers."""

    dtype: str
    device: str
    """Kind of device, its index left out: it differs by rank on every GPU host."""
    piece: Piece
    note: str | None
    requires_grad: bool

    @property
    def family(self) -> MeshFamily | None:
        """The kind of mesh that it lies over, None where that is not known."""
        layout = self.piece.layout
        if layout.mesh is None:
            return None
        return MeshFamily(axes=layout.mesh.axes, shape=layout.mesh.shape, source=layout.source)

    @property
    def facts(self) -> TensorFacts:
        """The same as a step has it."""
        piece, family = self.piece, self.family
        placed = piece.layout.by_axis().items() if family is not None else ()
        return TensorFacts(
            dtype=self.dtype,
            device=self.device,
            shape=piece.shape,
            global_shape=piece.global_shape,
            source=piece.layout.source.value,
            mesh=family.name if family is not None else "",
            placements=tuple(placed),
            ranges=piece.ranges,
            note=self.note,
            requires_grad=self.requires_grad,
        )


UNKNOWN_MODULE = ModuleName(
    path="@Unknown", raw_path="@Unknown", class_name="Unknown", wrappers=(), opaque=False
)
"""What calls are charged to whose module's definition is missing; always number 0."""

_KINDS = ("module", "slot", "meta", "text", "collective")

Lookup = NDArray[np.int64]
"""A stream's own definition numbers -> common numbers, -1 where it has none."""


@dataclass(slots=True)
class Vocabulary:
    """Common numbers of everything, and each stream's way into them."""

    modules: Interned[ModuleName] = field(default_factory=Interned)
    paths: Interned[str] = field(default_factory=Interned)
    path_of: Lookup = field(default_factory=lambda: np.empty(0, np.int64))
    slots: Interned[str] = field(default_factory=Interned)
    descriptions: Interned[Description] = field(default_factory=Interned)
    texts: Interned[str] = field(default_factory=Interned)
    collectives: Interned[Collective] = field(default_factory=Interned)
    lookups: list[dict[str, Lookup]] = field(default_factory=list)
    """Of each stream, by the kind of definition (`_KINDS`)."""


def common_numbers(lookup: Lookup, numbers: NDArray[Any]) -> Lookup:
    """Return the common numbers of some of a stream's own, -1 for those it did not define."""
    is_defined = numbers < len(lookup)
    return np.where(is_defined, lookup[np.where(is_defined, numbers, 0).astype(np.int64)], -1)


def build_vocabulary(streams: Sequence[RankStream]) -> Vocabulary:
    """Return the common numbers for the definitions of all streams (lowest rank first)."""
    vocabulary = Vocabulary()
    vocabulary.modules.number(UNKNOWN_MODULE)
    defined = ({**stream.defined("root"), **stream.defined("inside")} for stream in streams)
    names = name_roots([roots_of(definitions) for definitions in defined])
    # ranks share the dicts of equal definitions: what was numbered once is known by identity
    numbered: dict[object, dict[int, int]] = {}
    # and most ranks have the same under the same numbers as the one before them
    before: dict[object, tuple[Mapping[int, dict[str, Any]], Lookup]] = {}
    for stream, roots in zip(streams, names):
        # numbers count up from 1: one far beyond their count is damage, and must not cost memory
        size = min(max(stream.definitions, default=0), 2 * len(stream.definitions) + 65_536) + 1
        lookups: dict[str, Lookup] = {}
        for kind in _KINDS:
            context = _context(kind, stream, roots)
            earlier, lookup = before.get(context, ({}, np.empty(0, np.int64)))
            if len(lookup) == size and stream.defined(kind) == earlier:
                lookups[kind] = lookup
                continue
            lookup = lookups[kind] = np.full(size, -1, np.int64)
            before[context] = stream.defined(kind), lookup
            numbers = numbered.setdefault(context, {})
            for number, definition in stream.defined(kind).items():
                item = numbers.get(id(definition))
                if item is None:
                    try:
                        item = _number(vocabulary, definition, roots, stream.definitions)
                    except (KeyError, TypeError, ValueError, LayoutError):
                        continue  # written by something else: what names it is counted
                    numbers[id(definition)] = item
                if number < size:
                    lookup[number] = item
        vocabulary.lookups.append(lookups)
    paths = [vocabulary.paths.number(module.path) for module in vocabulary.modules.items]
    vocabulary.path_of = np.array(paths, np.int64)
    return vocabulary


def _context(kind: str, stream: RankStream, roots: Mapping[int, str]) -> object:
    """Return what else a definition's meaning depends on: paths of roots, or meshes."""
    if kind == "module":
        return kind, *sorted(roots.items())
    if kind == "meta":
        return kind, *sorted((number, id(mesh)) for number, mesh in stream.defined("mesh").items())
    return kind


def _number(
    vocabulary: Vocabulary,
    definition: Mapping[str, Any],
    roots: Mapping[int, str],
    definitions: Mapping[int, Mapping[str, Any]],
) -> int:
    match definition["kind"]:
        case "module":
            return vocabulary.modules.number(_module(definition, roots))
        case "slot":
            return vocabulary.slots.number(str(definition["name"]))
        case "meta":
            return vocabulary.descriptions.number(_description(definition, definitions))
        case "collective":
            return vocabulary.collectives.number(Collective.from_fields(definition))
        case _:
            return vocabulary.texts.number(str(definition["text"]))


def mesh_of(definition: Mapping[str, Any]) -> Mesh:
    """Return the mesh a definition describes."""
    return Mesh(
        axes=tuple(map(str, definition["axes"])),
        shape=tuple(map(int, definition["shape"])),
        ranks=tuple(map(int, definition["ranks"])),
    )


def mark_of(definition: Mapping[str, Any]) -> LayoutMark:
    """Return the mark a definition describes. KeyError, TypeError, ValueError: fields of something
    else; LayoutError: an unknown placement."""
    text = str(definition["placement"])
    is_of_last_dim = text == LAST_DIM
    placement = parse_placement("Shard(0)" if is_of_last_dim else text)
    if placement.pieces is PieceKind.UNKNOWN:
        raise LayoutError(f"a mark says {placement}, which is not a placement")
    members = definition.get("members")
    return LayoutMark(
        axis=str(definition["axis"]),
        placement=placement,
        is_of_last_dim=is_of_last_dim,
        members=None if members is None else tuple(map(int, members)),
    )


def roots_of(definitions: Mapping[int, Mapping[str, Any]]) -> StreamRoots:
    """Return the root definitions among those of a stream."""
    roots, inside = [], {}
    for number, definition in definitions.items():
        if definition["kind"] == "root":
            name = str(definition["class"])
            roots.append(
                RootDefinition(
                    number=number,
                    class_name=name,
                    parameters=int(definition["parameters"]),
                    is_preferred=bool(definition.get("preferred", False)),
                )
            )
        elif definition["kind"] == "inside":
            inside[int(definition["root"])] = (int(definition["in"]), str(definition["path"]))
    return StreamRoots(roots=tuple(roots), inside=inside)


def _module(definition: Mapping[str, Any], roots: Mapping[int, str]) -> ModuleName:
    prefix = roots.get(int(definition["root"]), "")
    path = str(definition["path"])
    # a parameterless root's modules already carry "@ClassName" in front
    return ModuleName(
        path=join_path(prefix, path),
        raw_path=join_path(prefix, str(definition.get("raw_path", path))),
        class_name=str(definition["class"]),
        wrappers=tuple(map(str, definition.get("wrappers") or ())),
        opaque=bool(definition.get("opaque", False)),
    )


def _description(
    definition: Mapping[str, Any], definitions: Mapping[int, Mapping[str, Any]]
) -> Description:
    source = definition.get("source", "unknown")
    is_known = source in LayoutSource._value2member_map_  # a newer rankscope may have another
    has_mesh = is_known and definition.get("mesh") in definitions
    mesh = mesh_of(definitions[definition["mesh"]]) if has_mesh else None
    global_shape, ranges = definition.get("global_shape"), definition.get("ranges")
    placements = definition.get("placements") or () if mesh else ()
    piece = Piece(
        shape=tuple(map(int, definition["shape"])),
        layout=Layout(
            source=LayoutSource(source if is_known else "unknown"),
            mesh=mesh,
            placements=tuple(parse_placement(str(text)) for text in placements),
        ),
        global_shape=None if global_shape is None else tuple(map(int, global_shape)),
        ranges=None
        if ranges is None
        else tuple(tuple((int(a), int(b)) for a, b in dim) for dim in ranges),
    )
    return Description(
        dtype=str(definition["dtype"]),
        device=str(definition.get("device", "")).partition(":")[0],
        piece=piece,
        note=definition.get("note"),
        requires_grad=bool(definition.get("requires_grad", False)),
    )
