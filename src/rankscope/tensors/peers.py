"""Along which axes ranks are data-parallel peers, as far as the trace shows it.

No rank says that it is one. It is inferred, axis by axis, and never taken for more than that:

* **Parameters** are replicas along an axis where DTensors say `Replicate()` or where plain ones
  were bitwise equal at setup on all ranks along it. Constants prove nothing (zeros are equal on
  tensor-parallel shards too), so one that is no constant must be among them. They are shards where
  *every* DTensor is cut along the axis and FSDP is around a module (tensor parallelism leaves norms
  and biases whole, and puts no wrapper around anything), or where FSDP1 made them flat.
* **Root inputs** tell data from everything else: along a data axis they differ, along a
  tensor-parallel one every rank is handed the same. Both must hold.
* An axis whose name says that it cuts sequences, layers or experts is none: context parallelism
  looks exactly alike, and its pieces do not lie behind each other along the batch dim.

The mesh is the declared one, else the largest that parameters lie on (with the ranks that repeat it
as one more axis in front, "data"), else one axis over all ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from rankscope.layout.placement import LayoutSource, Mesh, PlacementKind, parse_placement
from rankscope.layout.plan import ranks_words
from rankscope.record.call import Phase
from rankscope.record.value import ValueFlag
from rankscope.tree.digests import Columns

if TYPE_CHECKING:
    from rankscope.tree.reader import Step, Trace
    from rankscope.tree.views import Node, SlotView

__all__ = ["DigestKey", "Peers", "find_peers", "is_alike", "is_constant", "owners_of", "prints_of"]

_NO_DATA: Final = re.compile(r"(^|_)(tp|sp|cp|pp|ep|tensor|sequence|seq|context|pipe|expert)(_|$)")
_OWN_AXIS: Final = "data"
_PEERS: Final[WeakKeyDictionary[Trace, dict[Any, Peers]]] = WeakKeyDictionary()
_OWNERS: Final[WeakKeyDictionary[Trace, dict[int, dict[str, tuple[int, ...]]]]] = (
    WeakKeyDictionary()
)
"""What was worked out of open traces, which do not change."""


@dataclass(frozen=True, slots=True)
class DigestKey:
    """What tells two ranks' values apart without their bytes."""

    hash: int
    count: int
    is_mix64: bool
    """Hashed on an accelerator: comparable with its like only."""


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
        kinds = {"replicas" if axis in self.replicas else "FSDP shards" for axis in self.data}
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
    columns = trace.columns()
    owned = [_Parameter(columns, views) for s in setup for views in _parameters(s, wanted)]
    mesh = declared or _mesh_of(owned, wanted)
    if not wanted <= set(mesh.ranks):
        mesh = _flat(wanted)
    wrappers = {w for s in (*setup, step) for node in s.walk() for w in node.wrappers}
    inputs = _root_inputs(columns, step, wanted)
    replicas, data, reasons = [], [], []
    for axis, extent in zip(mesh.axes, mesh.shape):
        if extent == 1:
            continue
        lines = list(_lines(mesh, axis))
        kind = _kind(owned, axis, lines, wrappers)
        if kind == "replicas":
            replicas.append(axis)
        if not _differ(inputs, lines):
            continue
        if _NO_DATA.search(axis.lower()):
            reasons.append(f"root inputs differ along {axis}, whose name says it cuts no batches")
        elif kind is None:
            reasons.append(
                f"root inputs differ along {axis}, but parameters are neither replicas nor FSDP "
                f"shards there"
            )
        else:
            data.append(axis)
    if not inputs:
        reasons.append("no digest of an input of the root was recorded in that step")
    if not owned:
        reasons.append("no parameters of these ranks were recorded at setup")
    if not reasons:
        reasons.append(f"{ranks_words(wanted)} were handed the same inputs")
    return Peers(
        mesh=mesh,
        replicas=tuple(replicas),
        data=tuple(data),
        samples=_samples(inputs, mesh, data, int(trace.run["settings"].get("batch-dim", 0))),
        why_not="" if data else "; ".join(reasons),
    )


def prints_of(columns: Columns, view: SlotView) -> dict[int, DigestKey]:
    """Return what tells the ranks' values apart, for those that were digested."""
    rows = slice(view.rows.start, view.rows.stop)
    names = ("rank", "hash", "count", "flags", "digested")
    own = (columns[f"values.{name}"][rows].tolist() for name in names)
    return {
        rank: DigestKey(number, count, bool(flags & ValueFlag.MIX64))
        for rank, number, count, flags, digested in zip(*own)
        if digested
    }


def is_alike(columns: Columns, views: Iterable[SlotView], ranks: Iterable[int]) -> bool:
    """True where all these ranks hold the same bytes, as far as digests tell."""
    prints = {rank: p for view in views for rank, p in prints_of(columns, view).items()}
    return None not in (held := {prints.get(rank) for rank in ranks}) and len(held) == 1


def is_constant(columns: Columns, views: Iterable[SlotView]) -> bool:
    """True where no rank holds two different finite elements: as equal on shards as on replicas."""
    return not any(
        columns["values.digested"][row] and columns["values.min"][row] < columns["values.max"][row]
        for view in views
        for row in view.rows
    )


# ---- parameters ----------------------------------------------------------------------------------


class _Parameter:
    """One parameter over all its ranks."""

    def __init__(self, columns: Columns, views: list[SlotView]) -> None:
        self.prints = {rank: p for view in views for rank, p in prints_of(columns, view).items()}
        is_placed = views[0].source is LayoutSource.DTENSOR  # what was declared proves nothing
        self.placements = views[0].placements if is_placed else {}
        self.mesh = views[0].layout().mesh if is_placed else None
        self.meshes = views[0].meshes
        self.is_constant = is_constant(columns, views)


def _parameters(setup: Step, ranks: frozenset[int]) -> Iterator[list[SlotView]]:
    """Yield the entries of every parameter that these ranks hold, all or some of them."""
    for node in setup.walk():
        by_slot: dict[str, list[SlotView]] = {}
        for view in node.slots:
            if view.slot.startswith("param:") and not ranks.isdisjoint(view.ranks):
                by_slot.setdefault(view.slot, []).append(view)
        yield from by_slot.values()


def _kind(
    owned: Iterable[_Parameter], axis: str, lines: list[list[int]], wrappers: set[str]
) -> str | None:
    """Return "replicas" or "shards", None where parameters are neither along an axis."""
    whole = cut = proofs = 0
    for parameter in owned:
        if axis in parameter.placements:
            placement = parse_placement(parameter.placements[axis])
            if placement.dim is not None:
                cut += 1
            elif placement.kind is PlacementKind.REPLICATE:
                whole += 1
                proofs += 1
            else:
                return None
            continue
        for line in lines:
            held = {parameter.prints[rank] for rank in line if rank in parameter.prints}
            if len(held) > 1 and "FSDP1" not in wrappers:
                return None
            cut += len(held) > 1
        proofs += not parameter.is_constant
    if cut:
        return "shards" if not whole and not wrappers.isdisjoint({"FSDP1", "FSDP2"}) else None
    return "replicas" if proofs else None


# ---- root inputs ---------------------------------------------------------------------------------


def _root_inputs(
    columns: Columns, step: Step, ranks: frozenset[int]
) -> list[tuple[SlotView, dict[int, DigestKey]]]:
    """Return the plain tensors that the root was handed, in the first micro-batch."""
    found: list[tuple[SlotView, dict[int, DigestKey]]] = []
    roots: Iterable[Node] = () if step.is_setup else step.nodes
    for node in roots:
        if node.phase is not Phase.FORWARD or node.path != "" or node.micro_batch:
            continue
        for view in node.slots:
            is_input = view.slot.split(".")[0] == "input" and view.dtype != "python"
            if is_input and view.source is not LayoutSource.DTENSOR:
                prints = {r: p for r, p in prints_of(columns, view).items() if r in ranks}
                if prints:
                    found.append((view, prints))
    return found


def _differ(
    inputs: Iterable[tuple[SlotView, dict[int, DigestKey]]], lines: list[list[int]]
) -> bool:
    return any(
        len({prints[rank] for rank in line if rank in prints}) > 1
        for _, prints in inputs
        for line in lines
    )


def _samples(
    inputs: Iterable[tuple[SlotView, dict[int, DigestKey]]], mesh: Mesh, data: list[str], dim: int
) -> dict[int, int]:
    """Return the size of the batch dim of the first input that differs along a data axis."""
    lines = [line for axis in data for line in _lines(mesh, axis)]
    sizes: dict[int, int] = {}
    for view, prints in inputs:
        if _differ([(view, prints)], lines):
            for rank, shape in view.shapes().items():
                if len(shape) > dim:
                    sizes.setdefault(rank, shape[dim])
    return sizes


# ---- meshes --------------------------------------------------------------------------------------


def _mesh_of(owned: Iterable[_Parameter], ranks: frozenset[int]) -> Mesh:
    """Return the mesh with the most axes that parameters lie on, over all of the ranks."""
    best: Mesh | None = None
    for parameter in owned:
        if parameter.mesh is None or (best and len(best.axes) >= len(parameter.mesh.axes)):
            continue
        family = [m for m in parameter.meshes if ranks.issuperset(m.ranks)]
        held = [rank for mesh in family for rank in mesh.ranks]
        if len(held) == len(set(held)) == len(ranks):
            best = _stacked(family)
    return best or _flat(ranks)


def _stacked(family: list[Mesh]) -> Mesh:
    rows = sorted(family, key=lambda mesh: min(mesh.ranks))
    first = rows[0]
    if len(rows) == 1:
        return first
    own = _OWN_AXIS if _OWN_AXIS not in first.axes else f"{_OWN_AXIS}_outer"
    return Mesh(
        axes=(own, *first.axes),
        shape=(len(rows), *first.shape),
        ranks=tuple(itertools.chain.from_iterable(mesh.ranks for mesh in rows)),
    )


def _flat(ranks: frozenset[int]) -> Mesh:
    return Mesh(axes=(_OWN_AXIS,), shape=(len(ranks),), ranks=tuple(sorted(ranks)))


def _lines(mesh: Mesh, axis: str) -> Iterator[list[int]]:
    """Yield the ranks along one axis, for every place on the others."""
    at = mesh.axes.index(axis)
    lines: dict[tuple[int, ...], list[int]] = {}
    for place, rank in zip(itertools.product(*map(range, mesh.shape)), mesh.ranks):
        lines.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
    yield from lines.values()
