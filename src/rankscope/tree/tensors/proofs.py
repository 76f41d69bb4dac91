"""How values lie that no layout describes, as far as `layout/proof.py` proves it of what a trace
shows.

`RecordedValues` is the one reader of calls for that proof; `rankscope layout` adds to it. Where
parameters are DTensors that are cut, the whole step of a value is looked at, because how others lie
follows from them; elsewhere the value alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rankscope.layout.infer import lines_along
from rankscope.layout.layoutfile import described_as
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.layout.proof import WHOLE, Claim, Proof, ShownValues, may_be_cut
from rankscope.record.phases import Phase
from rankscope.tree.slotview import shapes_of
from rankscope.tree.tensors.peers import (
    find_peers,
    is_constant,
    once_a_step,
    prints_of,
    steps_of,
    tensors_of,
)

if TYPE_CHECKING:
    from rankscope.tree.slotview import SlotView
    from rankscope.tree.views import Node, Value


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
                key, whole = (self._name_of(node), view.slot), view.global_shape or ()
                self.note_cut(key, axis, view.placements[name], view.shapes(), whole)
        for node in nodes:
            if node.phase is Phase.FORWARD:
                call = self._name_of(node)
                self.modules[call] = node.path, node.class_name
                inside = {self._name_of(n) for n in node.children if n.phase is Phase.FORWARD}
                if inside:
                    self.inner.setdefault(call, set()).update(inside)

    def axis_of(self, meshes: tuple[Mesh, ...], name: str) -> str:
        """Return the axis over the same ranks as one of some meshes; "" where there is none."""
        along, axes = _ranks_along(meshes, name), self.lines.items()
        return next((axis for axis, own in axes if along.issuperset(map(frozenset, own))), "")


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


def how_it_lies(value: Value, mesh: Mesh, told: Prints = digests) -> dict[str, Claim]:
    """Return how a value lies along the axes of a mesh, for those along which that is proven. A
    gradient is cut as what it is the gradient of."""
    node, slot = value.node, value.views[0].slot
    proof = once_a_step(node, (mesh, told), lambda: _proof_of_step(node, mesh, told))
    call, alone = _name(node), ShownValues(proof.shown.lines)
    alone.note((call, slot), shapes_of(value.views), told(value.views) or _moved(value, told))
    found = {axis: said for (_, axis), said in Proof(alone).known.items()}
    for axis in alone.lines:
        said = proof.known.get(((call, described_as(slot)), axis))
        if said is not None and said.placement != WHOLE:
            found.setdefault(axis, said)
    return found


def proven_layout(
    value: Value, declared: Mesh | None = None
) -> tuple[Mesh, dict[str, Placement]] | None:
    """Return a mesh of the ranks that hold a plain activation, and how it lies on it, where that is
    proven along every axis but those of data-parallel peers; None where not, or where it is cut
    along no axis."""
    peers = find_peers(value.node, value.ranks, declared=declared)
    said = how_it_lies(value, peers.mesh)
    found = {axis: each.placement for axis, each in said.items() if axis not in peers.data}
    sizes = zip(peers.mesh.axes, peers.mesh.shape)
    is_proven = {axis for axis, size in sizes if size > 1} <= {*found, *peers.data}
    is_cut = any(placement != WHOLE for placement in found.values())
    return (peers.mesh, found) if is_proven and is_cut else None


def _proof_of_step(of: Node, mesh: Mesh, told: Prints) -> Proof:
    axes = [axis for axis, size in zip(mesh.axes, mesh.shape) if size > 1]
    shown = RecordedValues({axis: lines_along(mesh, [axis]) for axis in axes}, _name)
    setups, step = steps_of(of)
    nodes = [node for setup in setups for node in setup.passing()]
    shown.read_calls(nodes)
    if shown.placed:
        calls = [*step.passing()]
        shown.read_calls(calls)
        nodes += calls
    for node in nodes if shown.placed else ():
        call, is_forward = _name(node), node.phase is Phase.FORWARD
        if is_forward and any(each.phase is Phase.COLLECTIVE for each in node.children):
            shown.issued.update({(call, axis): set() for axis in axes})
        is_shown = is_forward or node.phase is Phase.SETUP
        for slot, views in tensors_of(node).items() if is_shown else ():
            shown.note((call, slot), shapes_of(views), told(views), is_twin=is_forward)
    return Proof(shown)


def _name(node: Node) -> str:
    again = node.ordinal or node.micro_batch
    return f"{node.path} ({node.micro_batch}, {node.ordinal})" if again else node.path


def _moved(value: Value, told: Prints) -> Mapping[int, Hashable]:
    """Return what tells the ranks' gradients or updates of a constant parameter apart: zeros or
    ones are as equal on tensor-parallel shards as on replicas."""
    slot, node = value.views[0].slot, value.node
    if not slot.startswith("param:"):
        return {}
    moving = {slot, slot.replace("param:", "grad:", 1)}
    for each in steps_of(node)[1].walk():
        if each.path == node.path and each.phase in (Phase.GRADS, Phase.PARAMS):
            for found in filter(None, map(each.value, moving)):
                if prints := told(found.views):
                    return prints
    return {}
