"""How a tensor lies over a mesh: axes, placements, layouts, and the global indices a rank holds.

"Axis" is always a mesh axis and "dim" always a tensor dimension. For a 2x3 mesh with axes
``("dp", "tp")`` and a global tensor of shape (8, 6) placed ``(Replicate(), Shard(1))``::

              tp=0          tp=1          tp=2
    dp=0   [0:8, 0:2]    [0:8, 2:4]    [0:8, 4:6]
    dp=1   [0:8, 0:2]    [0:8, 2:4]    [0:8, 4:6]

`global_ranges` computes such boxes from shape, mesh shape, coordinate and placements alone; no
process group and no torch are needed, so it runs in the collector and on a laptop.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from rankscope.errors import LayoutError

Ranges = tuple[tuple[int, int], ...]
"""Half-open index ranges [start, stop) of one tensor dim, in the order the elements are held."""

_MOST_SPLITS = 1 << 16
"""Most pieces of a dim: torch's split factor is a product of sizes of mesh axes."""
_WHOLE = re.compile(r"-?[0-9]{1,9}")
_TEXT = re.compile(r"^(\w+)\((.*)\)$")


class PieceKind(enum.Enum):
    """What the pieces along one mesh axis are to the whole."""

    COPIES = "every rank holds the same"
    SLICES = "every rank holds other elements, of one dim"
    SUMMANDS = "the values of the ranks are reduced to the whole's"
    UNKNOWN = "how they make the whole is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFacts:
    """How placements of one kind are written and read, and their effect."""

    spelled: str
    torch_class: str
    """Class in torch.distributed.tensor.placement_types that becomes this kind; also in text."""
    arguments: tuple[str, ...] = ()
    """Fields of `Placement` that its brackets show: attributes of torch's class of the same
    name."""
    pieces: PieceKind


class PlacementKind(str, enum.Enum):
    """What one mesh axis does to a tensor; `facts` tells how."""

    REPLICATE = "replicate"
    SHARD = "shard"
    STRIDED_SHARD = "strided_shard"
    PARTIAL = "partial"
    OTHER = "other"
    """A placement of torch that rankscope does not interpret; `text` is torch's own repr."""

    @property
    def facts(self) -> KindFacts | None:
        """How it is written, read and put together; None for OTHER."""
        return _FACTS.get(self)

    @classmethod
    def of_torch_class(cls, name: str) -> PlacementKind:
        """Return the kind that a class of torch's is read as; OTHER for any other class."""
        return _BY_TORCH_CLASS.get(name, cls.OTHER)


_FACTS: Final = {
    PlacementKind.REPLICATE: KindFacts(
        spelled="Replicate", torch_class="Replicate", pieces=PieceKind.COPIES
    ),
    PlacementKind.SHARD: KindFacts(
        spelled="Shard", torch_class="Shard", arguments=("dim",), pieces=PieceKind.SLICES
    ),
    PlacementKind.STRIDED_SHARD: KindFacts(
        spelled="StridedShard",
        torch_class="_StridedShard",
        arguments=("dim", "split_factor"),
        pieces=PieceKind.SLICES,
    ),
    PlacementKind.PARTIAL: KindFacts(
        spelled="Partial",
        torch_class="Partial",
        arguments=("reduce_op",),
        pieces=PieceKind.SUMMANDS,
    ),
}
"""The only list of kinds: text, torch's classes and combination follow from it. `global_ranges`
says which elements a kind with a dim holds."""
_BY_TORCH_CLASS: Final = {facts.torch_class: kind for kind, facts in _FACTS.items()}
_BY_NAME: Final = _BY_TORCH_CLASS | {facts.spelled: kind for kind, facts in _FACTS.items()}
_UNTOLD: Final = {"split_factor": 1, "reduce_op": "sum"}  # arguments that text may leave out


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a tensor lies along one mesh axis; `dim` is the one that is cut, never negative."""

    kind: PlacementKind
    dim: int | None = None
    split_factor: int = 1
    """Of a strided shard: into how many pieces the dim was cut before this axis cut each piece."""
    reduce_op: str | None = None
    """Of a partial: "sum", "avg", "max", "min", "product" ..."""
    text: str | None = None
    """Torch's repr of a kind that is not interpreted. Such a value never composes."""

    def __post_init__(self) -> None:
        facts = self.kind.facts
        arguments = facts.arguments if facts else ()
        if ("dim" in arguments) != (self.dim is not None):
            raise LayoutError(
                f"placement {self.kind.value} with dim={self.dim}: only shards have a dim"
            )
        if self.dim is not None and self.dim < 0:
            raise LayoutError(f"a shard's dim must be counted from the front, got {self.dim}")
        if self.split_factor < 1:
            raise LayoutError(
                f"a strided shard's split factor must be >= 1, got {self.split_factor}"
            )
        if ("reduce_op" in arguments) != (self.reduce_op is not None):
            raise LayoutError(f"placement {self.kind.value} with reduce_op={self.reduce_op}")

    @property
    def pieces(self) -> PieceKind:
        """How the pieces relate to the whole."""
        facts = self.kind.facts
        return facts.pieces if facts else PieceKind.UNKNOWN

    @property
    def is_composable(self) -> bool:
        """True if digests of the pieces give that of the whole (also for sums and averages)."""
        if self.pieces is PieceKind.SUMMANDS:
            return self.reduce_op in ("sum", "avg")
        return self.pieces is not PieceKind.UNKNOWN

    def __str__(self) -> str:
        facts = self.kind.facts
        if facts is None:
            return self.text or "Unknown()"
        inside = [f"{name}={getattr(self, name)}" for name in facts.arguments]
        inside[:1] = [str(getattr(self, name)) for name in facts.arguments[:1]]
        return f"{facts.spelled}({', '.join(inside)})"


@lru_cache(maxsize=4096)
def parse_placement(text: str) -> Placement:
    """Return the placement that `str()` of a placement (or torch's own repr of one) describes;
    OTHER with the text kept where it cannot be read, which never composes.

    Cached: a trace has few texts and thousands of values.
    """
    unread = Placement(kind=PlacementKind.OTHER, text=text)
    match = _TEXT.match(text.strip())
    kind = _BY_NAME.get(match[1]) if match else None
    facts = kind.facts if kind else None
    if match is None or kind is None or facts is None:
        return unread
    parts = [part.strip() for part in match[2].split(",") if part.strip()]
    words = [part.split("=")[-1].strip().strip("'\"") for part in parts]
    # of a newer torch: what the further argument means is not known, so it never composes
    if len(words) > len(facts.arguments):
        return unread
    values: dict[str, Any] = dict(zip(facts.arguments, words))
    for name in facts.arguments:
        value = values.setdefault(name, _UNTOLD.get(name))
        if name != "reduce_op" and isinstance(value, str):
            if not _WHOLE.fullmatch(value):
                return unread
            values[name] = int(value)
            if name == "split_factor" and values[name] > _MOST_SPLITS:
                return unread
        elif value is None:
            return unread
    return Placement(kind=kind, **values)


class LayoutSource(str, enum.Enum):
    """Source of a layout, in falling order of trust."""

    DTENSOR = "dtensor"
    MARKED = "marked"
    """A framework's mark on a parameter or an activation; the tensor itself is plain."""
    DECLARED = "declared"
    INFERRED = "inferred"
    UNKNOWN = "unknown"

    @property
    def is_from_all_ranks(self) -> bool:
        """True for recorded plain tensors, whose places follow from the shapes of all ranks."""
        return self in (LayoutSource.MARKED, LayoutSource.DECLARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A device mesh: named axes ("axis0", "axis1" ... if torch has no names) over global ranks in
    row-major order."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or math.prod(self.shape) != len(self.ranks):
            raise LayoutError(
                f"mesh axes {self.axes} and shape {self.shape} do not fit "
                f"its {len(self.ranks)} ranks"
            )

    def places(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the position on every axis, and the rank that has it."""
        return zip(itertools.product(*map(range, self.shape)), self.ranks)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the position of a global rank on every axis, None for a rank outside the mesh."""
        if rank not in self.ranks:
            return None
        flat, position = self.ranks.index(rank), []
        for extent in reversed(self.shape):
            flat, index = divmod(flat, extent)
            position.append(index)
        return tuple(reversed(position))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The placements of a value on every axis of a mesh, and where they come from."""

    source: LayoutSource
    mesh: Mesh | None = None
    placements: tuple[Placement, ...] = ()

    def __post_init__(self) -> None:
        axes = len(self.mesh.axes) if self.mesh else 0
        if len(self.placements) != axes:
            raise LayoutError(f"{len(self.placements)} placements for a mesh of {axes} axes")

    def __str__(self) -> str:
        placed = " ".join(f"{axis}={text}" for axis, text in self.by_axis().items())
        return placed or self.source.value

    def __repr__(self) -> str:
        over = f", over {len(self.mesh.ranks)} ranks" if self.mesh else ""
        more = f"{over}, {self.source.value}" if self.placements else ""
        return f"Layout({self}{more})"

    def by_axis(self) -> dict[str, str]:
        """Return {axis name: placement text}, as the trace writes it."""
        return dict(zip(self.mesh.axes if self.mesh else (), map(str, self.placements)))


def global_ranges(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[Ranges, ...]:
    """Return, per tensor dim, the global index ranges the rank at `coordinate` holds.

    Axes act in mesh order on the index list left by the axes before them: `Shard` takes the
    ceil-sized chunk of its coordinate; a strided shard cuts the list into `split_factor` ceil-sized
    pieces, takes its chunk of each and joins them. Replicate and Partial leave the list whole. An
    empty shard has no ranges in its dim.

    Source: the sharding rules of torch.distributed.tensor, restated over lists of ranges because
    torch's own helper returns only the first offset of a strided shard.
    """
    ranges: list[Ranges] = [((0, size),) if size else () for size in global_shape]
    for extent, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.dim is None:
            continue
        if placement.dim >= len(ranges):
            raise LayoutError(f"{placement} cannot cut a tensor of {len(ranges)} dims")
        before, count = ranges[placement.dim], placement.split_factor
        pieces = (_chunk(before, count, number) for number in range(count))
        # a plain shard has one piece; a strided one takes its chunk of every piece
        ranges[placement.dim] = _join(_chunk(piece, extent, index) for piece in pieces)
    return tuple(ranges)


def length_of(ranges: Ranges) -> int:
    """Return how many elements ranges of one dim have."""
    return sum(stop - start for start, stop in ranges)


def _slice(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the elements start..stop of an index list, counted from its own beginning."""
    pieces, position = [], 0
    for first, last in ranges:
        low = max(start - position, 0)
        high = min(stop - position, last - first)
        if low < high:
            pieces.append((first + low, first + high))
        position += last - first
    return tuple(pieces)


def _chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    size = -(-length_of(ranges) // count)
    # torch's rule: chunks of equal size from the front, so the last ones may be short or empty
    return _slice(ranges, size * index, size * (index + 1))


def _join(pieces: Iterable[Ranges]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for piece in pieces:
        for start, stop in piece:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
    return tuple(joined)
