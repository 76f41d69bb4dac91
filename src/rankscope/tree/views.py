"""Typed views of a trace's nodes and values, over the JSON data of docs/trace-format.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.errors import TraceError
from rankscope.layout.placement import Layout
from rankscope.record.call import CallKey, CallStatus, Mode, Phase
from rankscope.record.combined import Combined
from rankscope.record.ranklists import parse_ranks, ranks_named
from rankscope.record.statistics import STATISTICS
from rankscope.record.value import Digest, Samples
from rankscope.tree.damage import damaged_is_trace_error
from rankscope.tree.slotview import SlotView, Whereabouts

if TYPE_CHECKING:
    import torch

    from rankscope.layout.layoutfile import LayoutFile
    from rankscope.tree.reader import Trace

__all__ = [
    "CallOutcome",
    "GroupHead",
    "Node",
    "SlotView",
    "TensorReaders",
    "Timing",
    "Value",
    "Whereabouts",
    "shape_text",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead:
    """What all nodes of one step (or of setup) have in common."""

    mode: Mode
    step: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How a call ended on some ranks."""

    ranks: tuple[int, ...]
    status: str
    """Word of a `CallStatus`; "error" of what failed inside rankscope."""
    error: str

    @property
    def has_returned(self) -> bool:
        """True where the call came back as any call does."""
        return self.status == CallStatus.RETURNED.word


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a call began, and how long it took over the ranks."""

    start_us: float
    """On the lowest rank, since the first call of the run."""
    min_us: float | None
    max_us: float | None
    slowest: int | None
    """Rank of max_us."""


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


class TensorReaders(NamedTuple):
    """What makes tensors of the values of a trace; `rankscope.open_trace` gives them to it, because
    this room knows no torch.
    """

    local: Callable[[Value, int], torch.Tensor]
    """What one rank held."""
    full: Callable[[Value, LayoutFile | None], torch.Tensor]
    """The global tensor."""


@dataclass(frozen=True, slots=True)
class Value:
    """One slot over all ranks, whether they agree on it or not."""

    views: tuple[SlotView, ...]
    """One, or several where ranks disagree in dtype, global shape or layout."""
    node: Node

    def local(self, rank: int) -> torch.Tensor:
        """Return what a rank held, over the bytes in the trace folder: mapped, not read. Writing to
        it leaves the trace as it is.

        Raises:
            SelectionError: the rank has no value here, or its bytes were not kept; says why.
        """
        return self._tensors().local(self, rank)

    def full(self, layouts: LayoutFile | None = None) -> torch.Tensor:
        """Return the global tensor, put together from what the ranks held.

        Warns (`TensorWarning`) where ranks that should hold the same do not, or could not be
        compared, and of what was inferred; `rankscope.tensors.globalvalues.whole_value` returns all
        of it beside the tensor.

        Args:
            layouts: declared layouts, for values that no DTensor describes.

        Raises:
            SelectionError: bytes that are needed were not kept; says why.
            LayoutError: nothing says how the pieces belong together, or they contradict it.
        """
        return self._tensors().full(self, layouts)

    def _tensors(self) -> TensorReaders:
        found = self.node.trace.tensors
        if found is None:
            raise TraceError("open the trace with rankscope.open_trace to read its tensors")
        return found

    def __str__(self) -> str:
        first = self.views[0]
        of_which = [
            f"{first.slot} {first.dtype}{shape_text(first)}",
            str(first.layout()) if first.placements else "layout unknown",
            ranks_named(self.ranks),
            f"{self.distinct} values" if self.distinct > 1 else "1 value",
        ]
        return ", ".join(of_which)

    def __repr__(self) -> str:
        return f"Value({self})"

    @property
    def distinct(self) -> int:
        """How many different values the ranks hold."""
        return sum(view.distinct for view in self.views)

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
        numbers = {each.name: digest.number(each.name) for each in STATISTICS}
        return Combined.of(numbers, ranks=view.ranks, sketch=digest.sketch)


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
        return parse_ranks(self.ranks_text)

    @property
    def ranks_text(self) -> str:
        """The same as the trace writes them: `0-7`."""
        return str(self.data["ranks"])

    @property
    def collectives(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """What ranks issued in this call, as `collective` of docs/trace-format.md, with those ranks
        as text: several entries where they differ, () where it is no collective's."""
        if "collective" in self.data:
            return ((self.ranks_text, self.data["collective"]),)
        return tuple((str(each["ranks"]), each) for each in self.data.get("collectives", ()))

    @property
    def status(self) -> str:
        """Word of a `CallStatus`, or "mixed" over the ranks."""
        return str(self.data["status"])

    @property
    def has_returned(self) -> bool:
        """True where the call came back on all its ranks, as most do."""
        return self.status == CallStatus.RETURNED.word

    @property
    def is_opaque(self) -> bool:
        """True where nothing inside was seen: a compiled region, a scripted module."""
        return bool(self.data.get("opaque", False))

    @property
    def outcomes(self) -> tuple[CallOutcome, ...]:
        """How it ended, by ranks."""
        listed = self.data.get("outcomes") or [{"ranks": self.data["ranks"], "status": self.status}]
        return tuple(
            CallOutcome(ranks=parse_ranks(o["ranks"]), status=o["status"], error=o.get("error", ""))
            for o in listed
        )

    @property
    def errors(self) -> tuple[CallOutcome, ...]:
        """Failures inside rankscope while it watched this call."""
        return tuple(
            CallOutcome(ranks=parse_ranks(e["ranks"]), status="error", error=e["error"])
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

    @property
    def trace(self) -> Trace:
        """The trace it is of."""
        return self._where.trace

    def value(self, slot: str) -> Value | None:
        """Return the value of one slot over all ranks, None where the node has no such slot."""
        views = tuple(view for view in self.slots if view.slot == slot)
        return Value(views, self) if views else None

    def walk(self) -> Iterator[Node]:
        """Yield this node and everything below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))
