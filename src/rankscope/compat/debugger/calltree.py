"""The module calls of one forward as the debugger of transformers nests them, from a trace's nodes.

A trace has every call; here stands what goes into that debugger's files: calls of modules that the
model holds, inputs of all, outputs of those that hold no others. What its `prune` leaves out is
left out before any tensor is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.tree.slotview import SlotView, by_slot
from rankscope.tree.views import Node, Step

_NUMBERED: Final = re.compile(r"(.*)\.(\d+)$")
_LOOSE: Final = "@"
"""Begins the path of a module that its root does not hold."""


@dataclass(slots=True, eq=False)
class ForwardCall:
    """One call of one module, as one rank made it or all did together, with the entries of its
    slots."""

    node: Node
    name: str
    """Class of the model, then the path of the module: `Net.layers.0`."""
    stem: str
    """Begins the names of its tensors' files: unlike `name` it differs from call to call."""
    inputs: Mapping[str, Any]
    """{"args": [forms], "kwargs": {name: form}}, forms as in docs/trace-format.md."""
    output: Any
    """Form of what `forward` returned; None where that is not known."""
    returned: Any
    """Form of what the caller got, where the module's own hooks made something else of it."""
    holds_others: bool
    error: str
    children: list[ForwardCall]
    views: dict[str, list[SlotView]] = field(default_factory=dict)


def forwards(
    steps: Sequence[Step], rank: int | None, roots: Callable[[Node], bool]
) -> Iterator[Node]:
    """Yield the calls of a model (`roots`) in these steps, of one rank or of all together (None),
    in the order of time; one step is in memory."""

    def found(step: Step) -> list[Node]:
        return [
            node
            for node in step.passing()
            if node.phase is Phase.FORWARD and (rank is None or rank in node.ranks) and roots(node)
        ]

    opened, nodes, places = -1, list[Node](), list[tuple[int, float, int, int]]()
    for number, step in enumerate(steps):
        if step.is_setup:
            continue
        opened, nodes = number, found(step)
        places += (
            (step.incarnation, node.time.start_us, number, place)
            for place, node in enumerate(nodes)
        )
    for _, _, number, place in sorted(places):
        if number != opened:
            opened, nodes = number, found(steps[number])
        yield nodes[place]


class CallReader:
    """Reads the calls of one forward, those of one rank or of all together (None). `mark` tells the
    files of this forward from those of others."""

    def __init__(self, root: Node, rank: int | None, mark: str) -> None:
        self._rank = rank
        self._class = root.class_name
        self._root = root.path
        self._mark = mark

    def call(self, node: Node) -> ForwardCall:
        """Return a call, that of the model or one inside it, with every call in it."""
        below = node.path[len(self._root) + 1 :] if self._root else node.path
        path = f".{below}" if node.path != self._root else ""
        again = f"_{node.ordinal}" if node.ordinal and path else ""
        views = by_slot(v for v in node.slots if self._rank is None or self._rank in v.ranks)
        children = [self.call(child) for child in self._below(node)]
        inputs, held = self._inputs(views, bool(children))
        return ForwardCall(
            node=node,
            name=f"{self._class}{path}",
            stem=f"{self._class}{self._mark}{path}{again}",
            inputs=inputs,
            output=self._output(views),
            returned=_nested("returned", self._leaves(views, "returned")),
            holds_others=held,
            error=self._error(node),
            children=children,
            views=views,
        )

    def _below(self, node: Node) -> Iterator[Node]:
        """Yield the calls inside one; of a module that nobody holds those inside it instead."""
        for child in node.children:
            is_seen = self._rank is None or self._rank in child.ranks
            if (
                not is_seen
                or child.phase is not Phase.FORWARD
                or child.status == CallStatus.NOT_ENTERED.word
            ):
                continue
            if self._is_held(child.path):
                yield child
            else:
                yield from self._below(child)

    def _is_held(self, path: str) -> bool:
        if self._root:
            return path.startswith(f"{self._root}.") or path == self._root
        return not path.startswith(_LOOSE)

    def _inputs(
        self, views: Mapping[str, list[SlotView]], has_children: bool
    ) -> tuple[Mapping[str, Any], bool]:
        found = self._form(views, "form:input")
        if found is not None:
            return {"args": found["args"], "kwargs": found["kwargs"]}, found["modules"] > 0
        guessed = _nested("input", self._leaves(views, "input")) or []
        items = guessed.get("items", {}) if isinstance(guessed, dict) else dict(enumerate(guessed))
        args = [form for name, form in items.items() if str(name).isdecimal()]
        kwargs = {str(name): form for name, form in items.items() if not str(name).isdecimal()}
        return {"args": args, "kwargs": kwargs}, has_children

    def _output(self, views: Mapping[str, list[SlotView]]) -> Any:
        found = self._form(views, "form:output")
        return _nested("output", self._leaves(views, "output")) if found is None else found

    def _form(self, views: Mapping[str, list[SlotView]], slot: str) -> Any:
        for view in views.get(slot, ()):
            for fold in view.pieces:
                if self._rank is None or self._rank in fold.ranks:
                    return json.loads(fold.note or "null")
        return None

    def _leaves(self, views: Mapping[str, list[SlotView]], kind: str) -> dict[str, Any]:
        """Return {slot: form}, for a trace in which no forms were asked for."""
        leaves: dict[str, Any] = {}
        for slot, entries in views.items():
            if slot == kind or slot.startswith(f"{kind}."):
                is_text = entries[0].dtype == "python"
                leaves[slot] = entries[0].folds[0].note if is_text else {"slot": slot}
        return leaves

    def _error(self, node: Node) -> str:
        for outcome in node.outcomes:
            if not outcome.has_returned and (self._rank is None or self._rank in outcome.ranks):
                return outcome.error or outcome.status.replace("_", " ")
        return ""


def _nested(prefix: str, leaves: Mapping[str, Any]) -> Any:
    """Return the form that slots speak for: a list where their names are numbers from 0; None for
    no slots."""
    if not leaves:
        return None
    if set(leaves) == {prefix}:
        return leaves[prefix]
    groups: dict[str, dict[str, Any]] = {}
    for slot, leaf in leaves.items():
        name = slot[len(prefix) + 1 :].split(".")[0]
        groups.setdefault(name, {})[slot] = leaf
    forms = {name: _nested(f"{prefix}.{name}", group) for name, group in groups.items()}
    is_list = list(forms) == [str(number) for number in range(len(forms))]
    return list(forms.values()) if is_list else {"items": forms}


def prune_layers(call: ForwardCall) -> None:
    """Leave the first and the last of each list of layers, here and below."""
    lists: dict[str, list[ForwardCall]] = {}
    for child in call.children:
        found = _NUMBERED.match(child.name)
        if found and any(f".{found[2]}." in inner.name for inner in child.children):
            lists.setdefault(found[1], []).append(child)
    dropped = {layer for layers in lists.values() for layer in layers[1:-1]}
    call.children = [child for child in call.children if child not in dropped]
    for child in call.children:
        prune_layers(child)
