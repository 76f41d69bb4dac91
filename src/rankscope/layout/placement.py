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
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rankscope.errors import LayoutError

__all__ = [
    "Layout",
    "LayoutSource",
    "Mesh",
    "Placement",
    "PlacementKind",
    "Ranges",
    "global_ranges",
    "parse_placement",
]

Ranges = tuple[tuple[int, int], ...]
"""Half-open index ranges [start, stop) of one tensor dim, in the order the elements are held."""

_NEEDS_DIM = frozenset({"shard", "strided_shard"})
_TEXT = re.compile(r"^(Shard|StridedShard|_StridedShard|Replicate|Partial)\((.*)\)$")


class PlacementKind(str, enum.Enum):
    """What one mesh axis does to a tensor."""

    REPLICATE = "replicate"
    SHARD = "shard"
    STRIDED_SHARD = "strided_shard"
    PARTIAL = "partial"
    OTHER = "other"
    """A placement of torch's that rankscope does not interpret; `text` keeps its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a tensor lies along one mesh axis."""

    kind: PlacementKind
    dim: int | None = None
    """Tensor dim that is cut, for the two kinds of shard; never negative."""
    split_factor: int = 1
    """For a strided shard: into how many pieces the dim was cut before this axis cut each piece."""
    reduce_op: str | None = None
    """For a partial: "sum", "avg", "max", "min", "product" ..."""
    text: str | None = None
    """For kinds that are not interpreted: torch's own repr. Such a value never composes."""

    def __post_init__(self) -> None:
        if (self.kind.value in _NEEDS_DIM) != (self.dim is not None):
            raise LayoutError(
                f"placement {self.kind.value} with dim={self.dim}: only shards have a dim"
            )
        if self.dim is not None and self.dim < 0:
            raise LayoutError(f"a shard's dim must be counted from the front, got {self.dim}")
        if self.split_factor < 1:
            raise LayoutError(
                f"a strided shard's split factor must be >= 1, got {self.split_factor}"
            )
        if (self.kind is PlacementKind.PARTIAL) != (self.reduce_op is not None):
            raise LayoutError(f"placement {self.kind.value} with reduce_op={self.reduce_op}")

    @property
    def is_composable(self) -> bool:
        """True where digests of the pieces give the digest of the whole (sum and avg partials
        included).
        """
        if self.kind is PlacementKind.PARTIAL:
            return self.reduce_op in ("sum", "avg")
        return self.kind is not PlacementKind.OTHER

    def __str__(self) -> str:
        match self.kind:
            case PlacementKind.REPLICATE:
                return "Replicate()"
            case PlacementKind.SHARD:
                return f"Shard({self.dim})"
            case PlacementKind.STRIDED_SHARD:
                return f"StridedShard({self.dim}, split_factor={self.split_factor})"
            case PlacementKind.PARTIAL:
                return f"Partial({self.reduce_op})"
            case _:
                return self.text or "Unknown()"


@lru_cache(maxsize=4096)
def parse_placement(text: str) -> Placement:
    """Return the placement that `str()` of a placement (or torch's own repr of one) describes.

    Anything that cannot be read becomes kind OTHER with its text kept; it never composes. A trace
    has few texts and thousands of values: each text is read once.
    """
    found = _TEXT.match(text.strip())
    if not found:
        return Placement(kind=PlacementKind.OTHER, text=text)
    name, inside = found.groups()
    arguments = [
        part.split("=")[-1].strip().strip("'\"") for part in inside.split(",") if part.strip()
    ]
    if name == "Replicate":
        return Placement(kind=PlacementKind.REPLICATE)
    if name == "Partial":
        return Placement(kind=PlacementKind.PARTIAL, reduce_op=arguments[0] if arguments else "sum")
    if not arguments or not all(part.lstrip("-").isdecimal() for part in arguments):
        return Placement(kind=PlacementKind.OTHER, text=text)
    if name == "Shard":
        return Placement(kind=PlacementKind.SHARD, dim=int(arguments[0]))
    factor = int(arguments[1]) if len(arguments) > 1 else 1
    return Placement(kind=PlacementKind.STRIDED_SHARD, dim=int(arguments[0]), split_factor=factor)


class LayoutSource(str, enum.Enum):
    """Where a layout comes from, in falling order of trust."""

    DTENSOR = "dtensor"
    DECLARED = "declared"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A device mesh: named axes over global ranks in row-major order."""

    axes: tuple[str, ...]
    """Axis names; unnamed axes are called "axis0", "axis1" ..."""
    shape: tuple[int, ...]
    """Size of each axis."""
    ranks: tuple[int, ...]
    """Global ranks, row-major over `shape`."""

    def __post_init__(self) -> None:
        size = 1
        for extent in self.shape:
            size *= extent
        if len(self.axes) != len(self.shape) or size != len(self.ranks):
            raise LayoutError(
                f"mesh axes {self.axes} and shape {self.shape} do not fit "
                f"its {len(self.ranks)} ranks"
            )

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the position of a global rank on every axis, or None where the rank is not in the
        mesh.
        """
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
        return (
            f"Layout({self}{over}, {self.source.value})" if self.placements else f"Layout({self})"
        )

    def by_axis(self) -> dict[str, str]:
        """Return {axis name: placement text}, as the trace writes it."""
        return {
            axis: str(p)
            for axis, p in zip(self.mesh.axes if self.mesh else (), self.placements, strict=True)
        }


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
    held: list[Ranges] = [((0, size),) if size else () for size in global_shape]
    for extent, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.dim is None:
            continue
        if placement.dim >= len(held):
            raise LayoutError(f"{placement} cannot cut a tensor of {len(held)} dims")
        pieces = _cut(held[placement.dim], placement.split_factor)
        held[placement.dim] = _join(_chunk(piece, extent, index) for piece in pieces)
    return tuple(held)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _slice(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the elements start..stop of an index list, counted from its own beginning."""
    taken, position = [], 0
    for first, last in ranges:
        low = max(start - position, 0)
        high = min(stop - position, last - first)
        if low < high:
            taken.append((first + low, first + high))
        position += last - first
    return tuple(taken)


def _chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    size = -(-_length(ranges) // count)
    return _slice(ranges, size * index, size * (index + 1))


def _cut(ranges: Ranges, count: int) -> list[Ranges]:
    return [_chunk(ranges, count, index) for index in range(count)] if count > 1 else [ranges]


def _join(pieces: Iterable[Ranges]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for piece in pieces:
        for start, stop in piece:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
    return tuple(joined)
