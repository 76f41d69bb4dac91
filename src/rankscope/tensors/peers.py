"""Who are data-parallel peers, as far as `layout/infer.py` says it of what a trace shows.

The mesh of peers is the declared one, else the largest that parameters lie on (with the ranks that
repeat it as one more axis in front, "data"), else one axis over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from rankscope.layout.infer import (
    AxisName,
    AxisUse,
    HeldParameter,
    axes_of,
    differ_along,
    flat_mesh,
    largest_mesh,
    lines_along,
    named_as,
)
from rankscope.layout.placement import LayoutSource, Mesh
from rankscope.layout.plan import ranks_words
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.tree.slotview import by_slot

if TYPE_CHECKING:
    from rankscope.tree.slotview import SlotView
    from rankscope.tree.views import Node, Step, Trace


DigestKey = tuple[int, int, bool]
"""What tells two ranks' values apart without their bytes: hash, count, and whether it was hashed on
an accelerator, which is comparable with its like only."""
_PEERS: Final[WeakKeyDictionary[Trace, dict[Any, Peers]]] = WeakKeyDictionary()
_OWNERS: Final[WeakKeyDictionary[Trace, dict[int, dict[str, tuple[int, ...]]]]] = (
    WeakKeyDictionary()
)
"""What was worked out of open traces, which do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What the trace shows about the ranks of one value."""

    mesh: Mesh
    replicas: tuple[str, ...]
    """Axes along which parameters are replicas."""
    data: tuple[str, ...]
    """Axes along which ranks are data-parallel peers."""
    samples: Mapping[int, int]
    """Size of the batch dim of the root's inputs, by rank, where there are data axes."""
    why_not: str
    """Why there is no data axis; "" where there is one."""

    @property
    def reason(self) -> str:
        """What speaks for the data axes, in words."""
        kinds = {
            (AxisUse.REPLICAS if axis in self.replicas else AxisUse.FSDP_SHARDS).value
            for axis in self.data
        }
        return (
            f"along {', '.join(self.data)} root inputs differ and parameters are "
            f"{' and '.join(sorted(kinds))}"
        )


def find_peers(
    trace: Trace, step: Step, ranks: Iterable[int], *, declared: Mesh | None = None
) -> Peers:
    """Return what can be inferred of these ranks; worked out once for all values of a step.

    Args:
        trace: an open trace.
        step: whose root inputs are looked at; the setup of a trace without steps.
        ranks: those that hold the value in question (a pipeline stage has axes of its own).
        declared: mesh of a layout file.
    """
    wanted = frozenset(ranks)
    known = _PEERS.setdefault(trace, {})
    key = (step.is_setup, step.mode, step.step, step.incarnation, wanted, declared)
    if key not in known:
        known[key] = _infer(trace, step, wanted, declared)
    return known[key]


def owners_of(trace: Trace, incarnation: int) -> Mapping[str, tuple[int, ...]]:
    """Return {path: ranks} of the modules that own parameters or buffers; read once."""
    known = _OWNERS.setdefault(trace, {})
    if incarnation not in known:
        known[incarnation] = {
            node.path: node.ranks
            for setup in trace.setup
            if setup.incarnation == incarnation
            for node in setup.walk()
        }
    return known[incarnation]


def _infer(trace: Trace, step: Step, wanted: frozenset[int], declared: Mesh | None) -> Peers:
    setup = [s for s in trace.setup if s.incarnation == step.incarnation]
    owned = [
        held_parameter(own)
        for s in setup
        for node in s.walk()
        for slot, views in tensors_of(node).items()
        if slot.startswith("param:") and (own := [v for v in views if wanted & {*v.ranks}])
    ]
    mesh = declared or largest_mesh(owned, wanted)
    if not wanted <= set(mesh.ranks):
        mesh = flat_mesh(wanted)
    wrappers = {w for s in (*setup, step) for node in s.walk() for w in node.wrappers}
    inputs = _root_inputs(step, wanted)
    facts = axes_of(mesh, owned, [prints for _, prints in inputs], wrappers)
    data = [each.axis for each in facts if each.is_data]
    reasons = []
    for each in facts:
        if each.has_other_inputs and not each.is_data:
            but = (
                "but parameters are neither replicas nor FSDP shards there"
                if named_as(each.axis) is not AxisName.NOT_DATA
                else "whose name says it cuts no batches"
            )
            reasons.append(f"root inputs differ along {each.axis}, {but}")
    if not inputs:
        reasons.append("no digest of an input of the root was recorded in that step")
    if not owned:
        reasons.append("no parameters of these ranks were recorded at setup")
    if not reasons:
        reasons.append(f"{ranks_words(wanted)} were handed the same inputs")
    return Peers(
        mesh=mesh,
        replicas=tuple(each.axis for each in facts if each.use is AxisUse.REPLICAS),
        data=tuple(data),
        samples=_samples(inputs, mesh, data, trace.batch_dim),
        why_not="" if data else "; ".join(reasons),
    )


def prints_of(views: Iterable[SlotView]) -> dict[int, DigestKey]:
    """Return what tells the ranks' values apart, for those that were digested."""
    names = ("rank", "hash", "count", "flags", "digested")
    return {
        rank: (number, count, bool(flags & ValueFlag.MIX64))
        for view in views
        for rank, number, count, flags, digested in zip(
            *(view.step[f"values.{name}"][view.rows].tolist() for name in names)
        )
        if digested
    }


def tensors_of(node: Node) -> dict[str, list[SlotView]]:
    """Return the entries of every tensor of a call by its slot."""
    return by_slot(view for view in node.slots if view.dtype != "python")


def is_constant(views: Iterable[SlotView]) -> bool:
    """True where no rank holds two different finite elements: as equal on shards as on replicas."""
    names = ("digested", "min", "max")
    columns = ([view.step[f"values.{name}"][view.rows] for name in names] for view in views)
    return not any((digested & (least < most)).any() for digested, least, most in columns)


# ---- parameters ----------------------------------------------------------------------------------


def held_parameter(views: list[SlotView]) -> HeldParameter:
    """Return one parameter over all its ranks."""
    is_placed = views[0].source in (LayoutSource.DTENSOR, LayoutSource.MARKED)
    return HeldParameter(
        placements=views[0].placements if is_placed else {},
        meshes=views[0].meshes if is_placed else (),
        prints=prints_of(views),
        is_constant=is_constant(views),
    )


# ---- root inputs ---------------------------------------------------------------------------------


def _root_inputs(step: Step, ranks: frozenset[int]) -> list[tuple[SlotView, dict[int, DigestKey]]]:
    """Return the plain tensors that the root was handed, in the first micro-batch."""
    found: list[tuple[SlotView, dict[int, DigestKey]]] = []
    roots: Iterable[Node] = () if step.is_setup else step.nodes
    for node in roots:
        if node.phase is not Phase.FORWARD or node.path != "" or node.micro_batch:
            continue
        for view in node.slots:
            is_input = view.slot.split(".")[0] == "input" and view.dtype != "python"
            if is_input and view.source is not LayoutSource.DTENSOR:
                prints = {r: p for r, p in prints_of([view]).items() if r in ranks}
                if prints:
                    found.append((view, prints))
    return found


def _samples(
    inputs: Iterable[tuple[SlotView, dict[int, DigestKey]]], mesh: Mesh, data: list[str], dim: int
) -> dict[int, int]:
    """Return the size of the batch dim of the first input that differs along a data axis."""
    lines = [line for axis in data for line in lines_along(mesh, [axis])]
    sizes: dict[int, int] = {}
    for view, prints in inputs:
        if differ_along(lines, prints):
            for rank, shape in view.shapes().items():
                if len(shape) > dim:
                    sizes.setdefault(rank, shape[dim])
    return sizes
