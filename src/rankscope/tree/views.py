"""Typed views of a trace's nodes and values, over the JSON data of docs/trace-format.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope.record.call import CallKey, Mode, Phase
from rankscope.record.placement import (
    Layout,
    LayoutSource,
    Mesh,
    Ranges,
    global_ranges,
    parse_placement,
)
from rankscope.record.value import Digest, Samples
from rankscope.tree.combined import Combined
from rankscope.tree.damage import damaged_is_trace_error
from rankscope.tree.numbers import (
    COUNTS,
    STATISTICS,
    Columns,
    Fold,
    column_digest,
    read_combined,
    read_fold,
)
from rankscope.tree.ranks import parse_ranks

__all__ = ["GroupHead", "Node", "Outcome", "SlotView", "Timing", "Value", "Whereabouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead:
    """What all nodes of one step (or of setup) have in common."""

    mode: Mode
    step: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What views need beside their own data: the numbers' columns and the run's meshes."""

    columns: Callable[[], Columns]
    meshes: Mapping[str, tuple[Mesh, ...]]
    file: Path
    """What their own data was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended on some ranks."""

    ranks: tuple[int, ...]
    status: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a call began, and how long it took over the ranks."""

    start_us: float
    """On the lowest rank, since the first call of the run."""
    min_us: float | None
    max_us: float | None
    slowest: int | None
    """Rank of max_us."""


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
        return parse_ranks(self.data["ranks"])

    @property
    def dtype(self) -> str:
        """torch's name without the prefix, or "python"."""
        return str(self.data["dtype"])

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
    def placements(self) -> dict[str, str]:
        """{axis: placement}; {} where the layout is unknown."""
        return dict(self.data["layout"].get("placements", {}))

    def layout(self, rank: int | None = None) -> Layout:
        """Return the layout, with the mesh `rank` (default: the lowest) is in."""
        data = self.data["layout"]
        source = LayoutSource(data["source"])
        wanted = self.ranks[0] if rank is None else rank
        mesh = next(
            (m for m in self._where.meshes.get(data.get("mesh", ""), ()) if wanted in m.ranks), None
        )
        if mesh is None:
            return Layout(source=source)
        texts = data["placements"]
        return Layout(
            source=source, mesh=mesh, placements=tuple(parse_placement(texts[a]) for a in mesh.axes)
        )

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The distinct values; in a large trace, ranks of the same shape together, without
        numbers."""
        return tuple(read_fold(each) for each in self.data["values"])

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
        return tuple(read_combined(each) for each in self.data.get("combined", ()))

    @property
    def rows(self) -> range:
        """Rows of the value columns, one per rank."""
        return range(*self.data["rows"])

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

    def ranges(self, rank: int) -> tuple[Ranges, ...] | None:
        """Return the global indices a rank holds, None where the layout is unknown."""
        for each in self.data["values"]:
            if "ranges" in each and rank in parse_ranks(each["ranks"]):
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


@dataclass(frozen=True, slots=True)
class Value:
    """One slot over all ranks, whether they agree on it or not."""

    views: tuple[SlotView, ...]
    """One, or several where ranks disagree in dtype, global shape or layout."""

    @property
    def is_uniform(self) -> bool:
        """True where all ranks agree on dtype, global shape and layout."""
        return len(self.views) == 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a value here."""
        return tuple(sorted({rank for view in self.views for rank in view.ranks}))

    @property
    def dtype(self) -> str:
        """dtype of the lowest rank's value."""
        return self.views[0].dtype

    @property
    def global_shape(self) -> tuple[int, ...] | None:
        """Shape of the whole tensor, None where the layout is unknown."""
        return self.views[0].global_shape

    @property
    def layout(self) -> Layout:
        """Layout of the lowest rank's value."""
        return self.views[0].layout()

    @property
    def per_rank(self) -> dict[int, Digest | None]:
        """Each rank's numbers, None where a value was not digested."""
        return dict(
            sorted({rank: d for view in self.views for rank, d in view.per_rank().items()}.items())
        )

    @property
    def samples(self) -> dict[int, Samples]:
        """Per-sample sketches by rank."""
        return {rank: samples for view in self.views for rank, samples in view.samples().items()}

    @property
    def combined(self) -> Combined | None:
        """Statistics of the whole tensor; None where its layout is unknown or meshes hold different
        ones.

        Where every rank holds the whole, they are that value's own.
        """
        if len(self.views) != 1:
            return None
        view = self.views[0]
        found = view.combined
        if len(found) == 1:
            return found[0]
        digest = next(iter(view.per_rank().values()), None)
        if found or not view.placements or digest is None:
            return None
        names = (*COUNTS, *STATISTICS, "sketch")
        return Combined(ranks=view.ranks, **{name: getattr(digest, name) for name in names})


@damaged_is_trace_error
@dataclass(frozen=True, slots=True)
class Node:
    """The same call merged over ranks."""

    data: Mapping[str, Any]
    head: GroupHead
    _where: Whereabouts = field(repr=False)

    @property
    def id(self) -> str:
        """16 hex digits that depend on the key alone: the same node has the same id in every
        trace."""
        return str(self.data["id"])

    @property
    def path(self) -> str:
        """Canonical path, "" for the root."""
        return str(self.data["path"])

    @property
    def raw_path(self) -> str:
        """Path with wrappers left in."""
        return str(self.data.get("raw_path", self.data["path"]))

    @property
    def class_name(self) -> str:
        """Class of the module."""
        return str(self.data["class"])

    @property
    def wrappers(self) -> tuple[str, ...]:
        """What was put around the module: "DDP", "FSDP2" ..."""
        return tuple(self.data.get("wrappers", ()))

    @property
    def phase(self) -> Phase:
        """Part of the step."""
        return Phase[str(self.data["phase"]).upper()]

    @property
    def micro_batch(self) -> int | None:
        """n-th call of the root in the step; None outside forward, recompute and backward."""
        found = self.data["micro_batch"]
        return None if found is None else int(found)

    @property
    def ordinal(self) -> int:
        """0 for the first call of this path in this phase of this micro-batch, and so on."""
        return int(self.data["ordinal"])

    @property
    def key(self) -> CallKey:
        """What made the ranks' calls one node."""
        return CallKey(
            mode=self.head.mode, step=self.head.step, micro_batch=self.micro_batch,
            phase=self.phase,
            path=self.path, ordinal=self.ordinal,
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that made the call."""
        return parse_ranks(self.data["ranks"])

    @property
    def status(self) -> str:
        """ "returned", "raised", "abandoned", "stopped", "not_entered", "unfinished", or "mixed"
        over the ranks."""
        return str(self.data["status"])

    @property
    def is_opaque(self) -> bool:
        """True where nothing inside was seen: a compiled region, a scripted module."""
        return bool(self.data.get("opaque", False))

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """How it ended, by ranks."""
        listed = self.data.get("outcomes") or [{"ranks": self.data["ranks"], "status": self.status}]
        return tuple(
            Outcome(ranks=parse_ranks(o["ranks"]), status=o["status"], error=o.get("error", ""))
            for o in listed
        )

    @property
    def errors(self) -> tuple[Outcome, ...]:
        """Failures inside rankscope while it watched this call."""
        return tuple(
            Outcome(ranks=parse_ranks(e["ranks"]), status="error", error=e["error"])
            for e in self.data.get("errors", ())
        )

    @property
    def time(self) -> Timing:
        """When it began and how long it took."""
        return Timing(**self.data["time"])

    @property
    def slots(self) -> tuple[SlotView, ...]:
        """Slot entries in the order they were recorded."""
        return tuple(SlotView(each, i, self._where) for i, each in enumerate(self.data["slots"]))

    @property
    def children(self) -> tuple[Node, ...]:
        """Calls made inside this one."""
        return tuple(Node(each, self.head, self._where) for each in self.data["children"])

    def value(self, slot: str) -> Value | None:
        """Return the value of one slot over all ranks, None where the node has no such slot."""
        views = tuple(view for view in self.slots if view.slot == slot)
        return Value(views) if views else None

    def walk(self) -> Iterator[Node]:
        """Yield this node and everything below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))
