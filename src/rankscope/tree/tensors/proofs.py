"""What a trace shows of values that no layout describes: data-parallel peers, and how values lie.

`layout/infer.py` decides; `RecordedValues` is the one reader of calls for the
proof. The mesh of peers is the declared one, else the largest that parameters lie on (with the
ranks that repeat it as one more axis in front, "data"), else one axis over all ranks. Where
parameters are DTensors that are cut, the whole step of a value is looked at, because how others lie
follows from them; elsewhere the value alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from rankscope.layout.infer import (
    WHOLE,
    AxisName,
    AxisUse,
    Claim,
    HeldParameter,
    Proof,
    ShownValues,
    axes_of,
    differ_along,
    flat_mesh,
    largest_mesh,
    lines_along,
    may_be_cut,
    named_as,
)
from rankscope.layout.layoutfile import described_as
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.layout.plan import ranks_words
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.tree.slotview import by_slot, shapes_of

if TYPE_CHECKING:
    from rankscope.tree.slotview import SlotView
    from rankscope.tree.step import StepHead
    from rankscope.tree.views import Node, Step, Trace, Value

DigestKey = tuple[int, int, bool]
"""What tells two ranks' values apart without their bytes: hash, count, and whether the hash is an
accelerator's, which is comparable with its like only."""
_STEPS: Final[WeakKeyDictionary[Trace, tuple[StepHead, dict[Hashable, Any]]]] = WeakKeyDictionary()
"""What was worked out of the step that was asked about last, of each open trace."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What the trace shows about the ranks of one value: along which axes parameters are replicas,
    and along which ranks are data-parallel peers."""

    mesh: Mesh
    replicas: tuple[str, ...]
    data: tuple[str, ...]
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


def once_a_step(node: Node, key: Hashable, work_out: Callable[[], T]) -> T:
    """Return what `work_out` returns, kept by `key` while a node's step is the one asked about."""
    head, results = _STEPS.get(node.trace, (None, {}))
    # keys are callers' meshes and rank sets; a second step would hold its columns in memory too
    if head != node.head:
        results = {}
        _STEPS[node.trace] = node.head, results
    if key not in results:
        results[key] = work_out()
    result: T = results[key]
    return result


def steps_of(node: Node) -> tuple[list[Step], Step]:
    """Return the setups of a node's life, and its step: that itself, or the first of that life."""
    trace, head = node.trace, node.head
    setups = [step for step in trace.setup if step.incarnation == head.incarnation]
    steps = [step for step in trace.steps if step.incarnation == head.incarnation]
    exact = (step for step in steps if (step.mode, step.step) == (head.mode, head.step))
    return setups, next(exact, steps[0] if steps else trace.setup[0])


def find_peers(node: Node, ranks: Iterable[int], *, declared: Mesh | None = None) -> Peers:
    """Return what can be inferred of the ranks that hold a value of a node, from the root inputs of
    its step and from parameters.

    Beside `ranks` those count that should hold it: the owners of the node's module, or of the
    nearest around it (a pipeline stage has axes of its own). `declared` is the mesh of a layout
    file.
    """
    owners = once_a_step(node, "owners", lambda: _owners(node))
    parts = node.path.split(".") if node.path else []
    around = (".".join(parts[:size]) for size in range(len(parts), -1, -1))
    nearest = next((owners[path] for path in around if path in owners), ())
    group = frozenset((*ranks, *nearest))
    return once_a_step(node, (group, declared), lambda: _infer(node, group, declared))


def _owners(node: Node) -> dict[str, tuple[int, ...]]:
    return {node.path: node.ranks for setup in steps_of(node)[0] for node in setup.walk()}


def _infer(of: Node, group: frozenset[int], declared: Mesh | None) -> Peers:
    setup, step = steps_of(of)
    owned = [
        held_parameter(group_views)
        for s in setup
        for node in s.walk()
        for slot, views in tensors_of(node).items()
        if slot.startswith("param:") and (group_views := [v for v in views if group & {*v.ranks}])
    ]
    mesh = declared or largest_mesh(owned, group)
    if not group <= set(mesh.ranks):
        mesh = flat_mesh(group)
    wrappers = {w for s in (*setup, step) for node in s.walk() for w in node.wrappers}
    inputs = _root_inputs(step, group)
    facts = axes_of(mesh, owned, [prints for _, prints in inputs], wrappers)
    data = [fact.axis for fact in facts if fact.is_data]
    reasons = [
        f"root inputs differ along {fact.axis}, whose name says it cuts no batches"
        if named_as(fact.axis) is AxisName.NOT_DATA
        else f"root inputs differ along {fact.axis}, but parameters are neither replicas nor FSDP "
        f"shards there"
        for fact in facts
        if fact.has_other_inputs and not fact.is_data
    ]
    if not inputs:
        reasons.append("no digest of an input of the root was recorded in that step")
    if not owned:
        reasons.append("no parameters of these ranks were recorded at setup")
    if not reasons:
        reasons.append(f"{ranks_words(group)} were handed the same inputs")
    return Peers(
        mesh=mesh,
        replicas=tuple(fact.axis for fact in facts if fact.use is AxisUse.REPLICAS),
        data=tuple(data),
        samples=_samples(inputs, mesh, data, of.trace.batch_dim),
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
    return not any((digested & (least < greatest)).any() for digested, least, greatest in columns)


def held_parameter(views: list[SlotView]) -> HeldParameter:
    """Return one parameter over all its ranks."""
    is_placed = views[0].source in (LayoutSource.DTENSOR, LayoutSource.MARKED)
    return HeldParameter(
        placements=views[0].placements if is_placed else {},
        meshes=views[0].meshes if is_placed else (),
        prints=prints_of(views),
        is_constant=is_constant(views),
    )


def _root_inputs(step: Step, ranks: frozenset[int]) -> list[tuple[SlotView, dict[int, DigestKey]]]:
    inputs: list[tuple[SlotView, dict[int, DigestKey]]] = []
    roots: Iterable[Node] = () if step.is_setup else step.nodes
    for node in roots:
        if node.phase is not Phase.FORWARD or node.path != "" or node.micro_batch:
            continue
        for view in node.slots:
            is_input = view.slot.split(".")[0] == "input" and view.dtype != "python"
            if is_input and view.source is not LayoutSource.DTENSOR:
                prints = {r: p for r, p in prints_of([view]).items() if r in ranks}
                if prints:
                    inputs.append((view, prints))
    return inputs


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


Prints = Callable[["Sequence[SlotView]"], Mapping[int, Hashable]]
"""What tells the values of ranks apart; {} for constants, which are as equal on shards."""


class RecordedValues(ShownValues):
    """What the calls of a trace show, read step by step, the setup first."""

    def __init__(
        self, lines: Mapping[str, Sequence[tuple[int, ...]]], name_of: Callable[[Node], str]
    ) -> None:
        super().__init__(lines)
        self._name_of = name_of
        self.is_fsdp = False

    def read_calls(self, nodes: Sequence[Node]) -> None:
        """Add the modules that are called, what is called inside them, and cut DTensors."""
        self.is_fsdp |= _is_in_fsdp(nodes)
        for node, view, name in cut_dtensors(nodes):
            if axis := self.axis_of(view.meshes, name):
                key, shape = (self._name_of(node), view.slot), view.global_shape or ()
                self.note_cut(key, axis, view.placements[name], view.shapes(), shape)
        for node in nodes:
            if node.phase is Phase.FORWARD:
                call = self._name_of(node)
                self.modules[call] = node.path, node.class_name
                inside = {self._name_of(n) for n in node.children if n.phase is Phase.FORWARD}
                if inside:
                    self.inner.setdefault(call, set()).update(inside)

    def axis_of(self, meshes: tuple[Mesh, ...], name: str) -> str:
        """Return the axis over the same ranks as one of some meshes; "" without such an axis."""
        along, axes = _ranks_along(meshes, name), self.lines.items()
        return next((axis for axis, lines in axes if along.issuperset(map(frozenset, lines))), "")


def cut_dtensors(nodes: Sequence[Node]) -> Iterator[tuple[Node, SlotView, str]]:
    """Yield what lies cut as its DTensor or its mark says, with the axis: what goes in and out in
    forward, and of a setup the parameters that are computed with so."""
    is_fsdp = _is_in_fsdp(nodes)
    for node in nodes:
        is_setup = node.phase is Phase.SETUP
        for view in node.slots if is_setup or node.phase is Phase.FORWARD else ():
            if view.source in (LayoutSource.DTENSOR, LayoutSource.MARKED):
                for axis, placement in view.placements.items():
                    is_used_so = not is_setup or may_be_cut(axis, is_fsdp=is_fsdp)
                    if placement.dim is not None and is_used_so:
                        yield node, view, axis


def _is_in_fsdp(nodes: Sequence[Node]) -> bool:
    return any(word.startswith("FSDP") for node in nodes for word in node.wrappers)


@lru_cache
def _ranks_along(meshes: tuple[Mesh, ...], name: str) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(line) for mesh in meshes for line in lines_along(mesh, [name]))


def digests(views: Sequence[SlotView]) -> Mapping[int, Hashable]:
    """Return what tells the values of ranks apart by their digests, {} for constants."""
    return {} if is_constant(views) else prints_of(views)


def how_it_lies(value: Value, mesh: Mesh, prints: Prints = digests) -> dict[str, Claim]:
    """Return how a value lies along the axes of a mesh, for those along which that is proven. A
    gradient is cut as what it is the gradient of."""
    node, slot = value.node, value.views[0].slot
    proof = once_a_step(node, (mesh, prints), lambda: _proof_of_step(node, mesh, prints))
    call, alone = _name(node), ShownValues(proof.shown.lines)
    alone.note((call, slot), shapes_of(value.views), prints(value.views) or _moved(value, prints))
    lies = {axis: proven for (_, axis), proven in Proof(alone).known.items()}
    for axis in alone.lines:
        proven = proof.known.get(((call, described_as(slot)), axis))
        if proven is not None and proven.placement != WHOLE:
            lies.setdefault(axis, proven)
    return lies


def proven_layout(
    value: Value, declared: Mesh | None = None
) -> tuple[Mesh, dict[str, Placement]] | None:
    """Return a mesh of the ranks that hold a plain activation, and how it lies on it, where that is
    proven along every axis but those of data-parallel peers; None where not, or where it is cut
    along no axis."""
    peers = find_peers(value.node, value.ranks, declared=declared)
    proven = how_it_lies(value, peers.mesh)
    placements = {axis: lie.placement for axis, lie in proven.items() if axis not in peers.data}
    sizes = zip(peers.mesh.axes, peers.mesh.shape)
    is_proven = {axis for axis, size in sizes if size > 1} <= {*placements, *peers.data}
    is_cut = any(placement != WHOLE for placement in placements.values())
    return (peers.mesh, placements) if is_proven and is_cut else None


def _proof_of_step(of: Node, mesh: Mesh, prints: Prints) -> Proof:
    axes = [axis for axis, size in zip(mesh.axes, mesh.shape) if size > 1]
    values = RecordedValues({axis: lines_along(mesh, [axis]) for axis in axes}, _name)
    setups, step = steps_of(of)
    nodes = [node for setup in setups for node in setup.passing()]
    values.read_calls(nodes)
    if values.placed:
        calls = [*step.passing()]
        values.read_calls(calls)
        nodes += calls
    for node in nodes if values.placed else ():
        call, is_forward = _name(node), node.phase is Phase.FORWARD
        if is_forward and any(child.phase is Phase.COLLECTIVE for child in node.children):
            values.issued.update({(call, axis): set() for axis in axes})
        is_shown = is_forward or node.phase is Phase.SETUP
        for slot, views in tensors_of(node).items() if is_shown else ():
            values.note((call, slot), shapes_of(views), prints(views), is_twin=is_forward)
    return Proof(values)


def _name(node: Node) -> str:
    is_repeated = node.ordinal or node.micro_batch
    return f"{node.path} ({node.micro_batch}, {node.ordinal})" if is_repeated else node.path


def _moved(value: Value, prints: Prints) -> Mapping[int, Hashable]:
    """Return prints of gradients or updates of a constant parameter: constants equal on shards
    too."""
    slot, node = value.views[0].slot, value.node
    if not slot.startswith("param:"):
        return {}
    moving = {slot, slot.replace("param:", "grad:", 1)}
    for call in steps_of(node)[1].walk():
        if call.path == node.path and call.phase in (Phase.GRADS, Phase.PARAMS):
            for moved_value in filter(None, map(call.value, moving)):
                if moved_prints := prints(moved_value.views):
                    return moved_prints
    return {}
