"""How values lie that no layout describes, as far as `layout/proof.py` proves it of what a trace
shows.

Where parameters are DTensors that are cut, the whole step of a value is looked at, because how
others lie follows from them; elsewhere the value alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from rankscope.layout.infer import (
    lines_along,
)
from rankscope.layout.layoutfile import described_as
from rankscope.layout.placement import LayoutSource, Mesh
from rankscope.layout.proof import (
    WHOLE,
    Proof,
    Said,
    ShownValues,
    may_be_cut,
)
from rankscope.record.phases import Phase
from rankscope.tensors.peers import is_constant, prints_of, tensors_of
from rankscope.tree.slotview import shapes_of

if TYPE_CHECKING:
    from rankscope.tree.slotview import SlotView
    from rankscope.tree.views import Node, Step, Trace, Value


Prints = Callable[["Sequence[SlotView]"], Mapping[int, Hashable]]
"""What tells the values of ranks apart; {} for constants, which are as equal on shards."""
_PROOFS: Final[WeakKeyDictionary[Trace, dict[Any, Proof]]] = WeakKeyDictionary()
"""What was worked out of open traces, which do not change."""


def how_it_lies(value: Value, mesh: Mesh, prints: Prints | None = None) -> dict[str, Said]:
    """Return how a value lies along the axes of a mesh, for those along which that is proven.

    Args:
        value: of whatever phase; a gradient is cut as what it is the gradient of.
        mesh: over the ranks in question.
        prints: by digests where it is left out.
    """
    node, slot, told = value.node, value.views[0].slot, prints or digests
    known = _PROOFS.setdefault(node.trace, {})
    place = (node.head, mesh, told)
    if place not in known:
        if known and next(iter(known))[0] != node.head:
            known.clear()  # one step is in memory
        known[place] = _proof_of_step(node, mesh, told)
    key = (_name(node), slot)
    alone = ShownValues(known[place].shown.lines)
    alone.note(key, shapes_of(value.views), told(value.views) or _moved(value, told))
    found = {axis: said for (_, axis), said in Proof(alone).known.items()}
    described = key[0], described_as(slot)
    for axis in alone.lines:
        said = known[place].known.get((described, axis))
        if said is not None and said.placement != WHOLE:
            found.setdefault(axis, said)
    return found


def steps_of(node: Node) -> tuple[list[Step], Step]:
    """Return the setups of a node's life, and its step: that itself, or the first of that life."""
    trace, head = node.trace, node.head
    setups = [step for step in trace.setup if step.incarnation == head.incarnation]
    own = [step for step in trace.steps if step.incarnation == head.incarnation]
    exact = (step for step in own if (step.mode, step.step) == (head.mode, head.step))
    return setups, next(exact, own[0] if own else trace.setup[0])


def _proof_of_step(of: Node, mesh: Mesh, told: Prints) -> Proof:
    axes = [axis for axis, size in zip(mesh.axes, mesh.shape) if size > 1]
    shown = ShownValues({axis: lines_along(mesh, [axis]) for axis in axes})
    setups, step = steps_of(of)
    nodes = [node for setup in setups for node in setup.passing()]
    is_fsdp = any(word.startswith("FSDP") for node in nodes for word in node.wrappers)
    for key, view in (((node.path, view.slot), view) for node in nodes for view in node.slots):
        if view.source in (LayoutSource.DTENSOR, LayoutSource.MARKED) and view.global_shape:
            for axis in filter(view.placements.get, shown.lines):
                if may_be_cut(axis, is_fsdp=is_fsdp):
                    placement = view.placements[axis]
                    shown.note_cut(key, axis, placement, view.shapes(), view.global_shape)
    for node in itertools.chain(nodes, step.passing()) if shown.placed else ():
        call, is_forward = _name(node), node.phase is Phase.FORWARD
        if is_forward:
            shown.modules[call] = node.path, node.class_name
            inside = {_name(each) for each in node.children if each.phase is Phase.FORWARD}
            shown.inner.update({call: inside} if inside else {})
            if any(each.phase is Phase.COLLECTIVE for each in node.children):
                shown.issued.update({(call, axis): set() for axis in shown.lines})
        is_shown = is_forward or node.phase is Phase.SETUP
        for slot, views in tensors_of(node).items() if is_shown else ():
            prints = told(views)
            shown.note((call, slot), shapes_of(views), prints)
            if is_forward and prints and views[0].source is LayoutSource.UNKNOWN:
                shown.note_twin((call, slot), tuple(sorted(prints.items())))
    return Proof(shown)


def _name(node: Node) -> str:
    """Return what tells a call from others of the step."""
    again = node.ordinal or node.micro_batch
    return f"{node.path} ({node.micro_batch}, {node.ordinal})" if again else node.path


def digests(views: Sequence[SlotView]) -> Mapping[int, Hashable]:
    """Return what tells the values of ranks apart by their digests, {} for constants."""
    return {} if is_constant(views) else prints_of(views)


def _moved(value: Value, told: Prints) -> Mapping[int, Hashable]:
    """Return what tells the ranks' gradients or updates of a parameter apart that is a constant:
    that zeros or ones agree says nothing, tensor-parallel shards of them are no less equal."""
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
