"""One slot of one node as a view over its JSON data (docs/trace-format.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope.layout.placement import (
    Layout,
    LayoutSource,
    Mesh,
    Placement,
    Ranges,
    global_ranges,
    parse_placement,
)
from rankscope.record.ranklists import parse_ranks
from rankscope.record.streams import MAX_RANKS
from rankscope.record.value import Digest, Samples
from rankscope.record.wholestatistics import Combined
from rankscope.tree.damage import damaged_is_trace_error
from rankscope.tree.digests import Columns, Fold, column_digest, read_combined, read_fold

__all__ = ["SlotView", "Whereabouts", "is_bound_to_one_tensor", "shape_text"]


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What views need beside their own data: the numbers' columns, the run's meshes."""

    columns: Callable[[], Columns]
    meshes: Mapping[str, tuple[Mesh, ...]]
    file: Path
    """What their own data was read from."""
    world_size: int = MAX_RANKS
    """No rank is as high."""

    def ranks(self, text: str) -> tuple[int, ...]:
        """Return the ranks of a list.

        Raises:
            ValueError: it is none, or one of them is beyond the world.
        """
        return parse_ranks(text, self.world_size)


_SOURCES = frozenset(source.value for source in LayoutSource)
_UNKNOWN: Mapping[str, Any] = {"source": LayoutSource.UNKNOWN.value}


@damaged_is_trace_error
@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of one node, as the ranks that agree on it hold it."""

    data: Mapping[str, Any]
    place: int
    """Which entry of its node's list it is."""
    _where: Whereabouts = field(repr=False)

    @property
    def slot(self) -> str:
        """Name: `input.0`, `output`, `param:weight` ..."""
        return str(self.data["slot"])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a value here."""
        return self._where.ranks(self.data["ranks"])

    @property
    def dtype(self) -> str:
        """torch's name without the prefix, or "python"."""
        return str(self.data["dtype"])

    @property
    def device(self) -> str:
        """Where the value lay: "cpu", "cuda" ..."""
        return str(self.data["device"])

    @property
    def global_shape(self) -> tuple[int, ...] | None:
        """Shape of the whole tensor, None where the layout is unknown."""
        shape = self.data["shape"]
        return None if shape is None else tuple(shape)

    @property
    def disagreement(self) -> tuple[str, ...]:
        """What the ranks of this slot's entries differ in; () where there is one entry."""
        return tuple(self.data.get("disagree", ()))

    @property
    def placements(self) -> dict[str, Placement]:
        """{axis: placement}; {} where the layout is unknown."""
        texts = self._layout.get("placements", {})
        return {axis: parse_placement(text) for axis, text in texts.items()}

    @property
    def source(self) -> LayoutSource:
        """Where the layout comes from."""
        return LayoutSource(self._layout["source"])

    @property
    def _layout(self) -> Mapping[str, Any]:
        """The layout as it is written, unknown where a newer rankscope has a source of its own."""
        found: Mapping[str, Any] = self.data["layout"]
        return found if found["source"] in _SOURCES else _UNKNOWN

    def layout(self, rank: int | None = None) -> Layout:
        """Return the layout, with the mesh `rank` (default: the lowest) is in."""
        source = self.source
        wanted = self.ranks[0] if rank is None else rank
        mesh = next((m for m in self.meshes if wanted in m.ranks), None)
        if mesh is None:
            return Layout(source=source)
        placements = self.placements
        return Layout(
            source=source, mesh=mesh, placements=tuple(placements[axis] for axis in mesh.axes)
        )

    @property
    def mesh_name(self) -> str:
        """The kind of mesh that the layout names, such as `dp=2,tp=2`; "" where it is unknown."""
        return str(self._layout.get("mesh", ""))

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """All meshes of the kind that the layout names, over whatever ranks."""
        return self._where.meshes.get(self.mesh_name, ())

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The distinct values; in a large trace, ranks of the same shape together, without
        numbers."""
        return tuple(read_fold(each, self._where.world_size) for each in self.data["values"])

    @property
    def distinct(self) -> int:
        """How many different values the ranks hold."""
        summary = self.data.get("summary")
        return int(summary["distinct"]) if summary else len(self.data["values"])

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """Over the ranks, where the numbers stand in the columns alone."""
        return self.data.get("summary")

    @property
    def combined(self) -> tuple[Combined, ...]:
        """Global statistics, one per mesh that gives another result; () where nothing is
        sharded."""
        return tuple(
            read_combined(each, self._where.world_size) for each in self.data.get("combined", ())
        )

    @property
    def rows(self) -> range:
        """Rows of the value columns, one per rank."""
        first, last = self.data["rows"]
        if not 0 <= last - first <= self._where.world_size:
            raise ValueError(f"rows {first} to {last} are not those of the ranks")
        return range(first, last)

    def per_rank(self) -> dict[int, Digest | None]:
        """Return each rank's numbers, None where a value was not digested."""
        if self.data.get("summary") is None:
            return {rank: fold.digest for fold in self.folds for rank in fold.ranks}
        columns, rows = self._where.columns(), self.rows
        return {
            int(columns["values.rank"][row]): column_digest(columns, row)
            if columns["values.digested"][row]
            else None
            for row in rows
        }

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Return each rank's local shape."""
        return {
            rank: tuple(each["shape"])
            for each in self.data["values"]
            for rank in self._where.ranks(each["ranks"])
        }

    def references(self) -> dict[int, tuple[int, int]]:
        """Return {rank: (incarnation, reference)} of the ranks whose full tensor was kept."""
        if "kept" not in self.data:
            return {}
        columns, rows = self._where.columns(), slice(self.rows.start, self.rows.stop)
        names = ("rank", "incarnation", "reference")
        own = (columns[f"values.{name}"][rows].tolist() for name in names)
        return {rank: (life, number) for rank, life, number in zip(*own) if number}

    @property
    def not_kept(self) -> tuple[int, ...]:
        """Ranks whose full tensor was asked for and could not be kept."""
        return self._where.ranks(self.data.get("not_kept", ""))

    def ranges(self, rank: int) -> tuple[Ranges, ...] | None:
        """Return the global indices a rank holds, None where the layout is unknown."""
        for each in self.data["values"]:
            if "ranges" in each and rank in self._where.ranks(each["ranks"]):
                return tuple(tuple((a, b) for a, b in dim) for dim in each["ranges"])
        layout, shape = self.layout(rank), self.global_shape
        at = layout.mesh.coordinate(rank) if layout.mesh else None
        if layout.mesh is None or shape is None or at is None:
            return None
        return global_ranges(shape, layout.mesh.shape, at, layout.placements)

    def samples(self) -> dict[int, Samples]:
        """Return per-sample sketches by rank, for the ranks that have them."""
        columns = self._where.columns()
        found = {}
        for row in self.rows:
            first, count = (
                int(columns["values.sample_row"][row]),
                int(columns["values.sample_count"][row]),
            )
            if first >= 0:
                rows = columns["samples.sketch"][first : first + count].tolist()
                dim = int(columns["values.sample_dim"][row])
                found[int(columns["values.rank"][row])] = Samples(
                    dim=dim, rows=tuple(map(tuple, rows))
                )
        return found


def shape_text(slot: SlotView, rank: int | None = None) -> str:
    """Return the shape of the whole tensor, or what is common to the ranks' own: `[2, 32, *]`.

    Args:
        slot: one entry of a slot.
        rank: where the layout is unknown, this rank's own alone.
    """
    if slot.global_shape is not None:
        return str(list(slot.global_shape))
    shapes = {fold.shape for fold in slot.folds if rank is None or rank in fold.ranks}
    if len({len(shape) for shape in shapes}) != 1:
        return "[...]"
    sizes = [set(dim) for dim in zip(*shapes)]
    return f"[{', '.join(str(*size) if len(size) == 1 else '*' for size in sizes)}]"


def is_bound_to_one_tensor(slot: SlotView, others: Iterable[SlotView]) -> bool:
    """True where one mesh spans an entry and another of the same slot: its layout says that they
    hold one tensor. Stages of a pipeline share a path and hold different things.

    Args:
        slot: one entry.
        others: entries of the same slot, of ranks that differ from it.
    """
    mesh = slot.layout().mesh
    bound = set(mesh.ranks) if mesh else set()
    return any(other.placements and bound & set(other.ranks) for other in others)
