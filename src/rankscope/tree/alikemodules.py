"""Which modules of a step are alike: its calls as a tree of paths, and numbered siblings in groups.

Two modules are alike where their classes, calls, slots, ranks and the collectives of their forwards
are, and so are those of all modules inside them. The numbers of the values are not read; how many
different values the ranks hold in a slot counts, as do ranks that disagree.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.record.phases import Phase
from rankscope.record.ranks import parse_ranks, ranks_text
from rankscope.record.texts import counted
from rankscope.record.value import is_form
from rankscope.tree.slotview import SlotView
from rankscope.tree.tracejson import UNREADABLE, damage
from rankscope.tree.views import Node

_MOST_PARTS = 64
"""Of a path; a name that was made to hurt may have thousands of dots."""
_MOST_GROUPS = 6
_PYTHON = "python"
_CALL_FACTS = ("calls", "ended", "ranks", "wrappers", "opaque")
Fact = tuple[str, str]
"""Word of a phase ("" for all phases), and the name of a slot or a fact about calls."""


class ModuleOutline:
    """One module of a step, with what its calls in all phases have in common over micro-batches."""

    __slots__ = ("_forward", "children", "class_name", "facts", "kind", "path", "ranks")

    def __init__(
        self,
        path: str,
        nodes: Sequence[Node],
        children: dict[str, ModuleOutline],
        kinds: dict[Hashable, int],
    ) -> None:
        self.path = path
        self.children = children
        calls = [node for node in nodes if node.phase is not Phase.COLLECTIVE]
        classes = {node.class_name for node in calls} - {""}
        self.class_name = " or ".join(sorted(classes))
        """"" for what no call names: a list of modules, or a module that was never called."""
        self.ranks = _union({node.ranks_text for node in calls})
        """Those that called it; "" where none did, as of what only holds other modules."""
        self.facts: Mapping[Fact, Any] = _facts(nodes)
        self._forward = next((n for n in calls if n.phase is Phase.FORWARD), None)
        identity = (self.class_name, self.ranks, frozenset(self.facts.items()))
        inside = frozenset((name, child.kind) for name, child in children.items())
        self.kind: int = kinds.setdefault((identity, inside), len(kinds))
        """Equal for modules of one step that are alike."""

    @property
    def outputs(self) -> tuple[SlotView, ...]:
        """What its first forward call gave, or its caller got instead: one entry, several where
        ranks differ, () where it made no tensor."""
        slots = self._forward.slots if self._forward is not None else ()
        for name in ("returned", "output"):
            named = [slot for slot in slots if slot.slot.split(".")[0] == name]
            if tensors := [slot for slot in named if slot.dtype != _PYTHON]:
                return tuple(slot for slot in tensors if slot.slot == tensors[0].slot)
        return ()

    @property
    def number(self) -> int | None:
        """Its place in a list of modules, None where the last part of its path is no number."""
        return number_of(self.path.rpartition(".")[2])

    def walk(self) -> Iterator[ModuleOutline]:
        """Yield this module and all inside it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def __repr__(self) -> str:
        return f"ModuleOutline({self.path!r}, {self.class_name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeModules:
    """Modules that may share one line: alike ones, or too many unlike ones to name each."""

    modules: tuple[ModuleOutline, ...]
    """In the order they were called; one where nothing is to be folded."""
    kinds: int = 1

    @property
    def first(self) -> ModuleOutline:
        """The one that stands for all."""
        return self.modules[0]

    @property
    def path(self) -> str:
        """`layers.0-16,18`; the path itself of a single module."""
        if len(self.modules) == 1:
            return self.first.path
        stem, _, _ = self.first.path.rpartition(".")
        numbers = ranks_text(module.number or 0 for module in self.modules)
        return f"{stem}.{numbers}" if stem else numbers


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The first thing in which a module differs from another."""

    path: str
    """Inside both modules, "" for the modules themselves."""
    phase: str
    fact: str
    """Name of the fact, of the slot, or of a module that one of them lacks (`module`)."""
    value: Any
    other_value: Any


def module_outlines(nodes: Iterable[Node]) -> list[ModuleOutline]:
    """Return the outermost modules of a step or a setup, of its outermost calls, with all modules
    inside them. TraceError: the trace is damaged."""
    tops = list(nodes)
    roots = {node.path for node in tops}
    grown = _Branch("")
    for top in tops:
        for node in top.walk():
            grown.add(node, _parts(node.path, roots))
    kinds: dict[Hashable, int] = {}
    try:
        return [branch.outline(kinds) for branch in grown.inside.values()]
    except UNREADABLE as error:
        raise damage(tops[0].trace.path, error, " in the modules of a step") from error


def _parts(path: str, roots: set[str]) -> list[str]:
    """Return the path of the root, then the names below it."""
    if not path.startswith("@"):
        return ["", *path.split(".", _MOST_PARTS)] if path else [""]
    root = max((r for r in roots if path == r or path.startswith(f"{r}.")), key=len, default=path)
    below = path[len(root) + 1 :]
    return [root, *(below.split(".", _MOST_PARTS) if below else ())]


class _Branch:
    """A module while its calls are still gathered."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nodes: list[Node] = []
        self.inside: dict[str, _Branch] = {}

    def add(self, node: Node, parts: Sequence[str]) -> None:
        """Put a call where its path says, at the end of `parts`."""
        branch = self
        for part in parts:
            if part not in branch.inside:
                branch.inside[part] = _Branch(f"{branch.path}.{part}" if branch.path else part)
            branch = branch.inside[part]
        branch.nodes.append(node)

    def outline(self, kinds: dict[Hashable, int]) -> ModuleOutline:
        children = {name: branch.outline(kinds) for name, branch in self.inside.items()}
        return ModuleOutline(self.path, self.nodes, children, kinds)


def _union(texts: set[str]) -> str:
    """Return the ranks of several lists as one; most modules have one list."""
    if len(texts) == 1:
        return next(iter(texts))
    return ranks_text(rank for text in texts for rank in parse_ranks(text))


def _facts(nodes: Iterable[Node]) -> dict[Fact, Any]:
    """Return what must be equal in modules that are alike."""
    sets: dict[Fact, set[Hashable]] = {}
    calls: Counter[str] = Counter()
    issued: Counter[str] = Counter()
    for node in nodes:
        phase = node.phase.word
        if node.phase is Phase.COLLECTIVE:
            # backward's collectives stand wherever they overlap best, other ones in each layer
            of_forward = (f for _, f in node.collectives if f.get("issuer", "forward") == "forward")
            issued.update({*map(_issued, of_forward)})
            continue
        calls[phase] += 1
        sets.setdefault((phase, "ranks"), set()).add(node.ranks_text)
        if not node.has_returned:
            ends = ((o.status, ranks_text(o.ranks)) for o in node.outcomes if not o.has_returned)
            sets.setdefault((phase, "ended"), set()).update(ends)
        if node.is_opaque:
            sets.setdefault(("", "opaque"), set()).add(True)
        if node.wrappers:
            sets.setdefault(("", "wrappers"), set()).add(", ".join(node.wrappers))
        for slot in node.slots:
            if slot.dtype != _PYTHON and not is_form(slot.slot):
                sets.setdefault((phase, slot.slot), set()).add(_slot_facts(slot))
    facts: dict[Fact, Any] = {(phase, "calls"): count for phase, count in calls.items()}
    if issued:
        facts["", "collectives"] = frozenset(issued.items())
    return facts | {key: frozenset(values) for key, values in sets.items()}


def _slot_facts(slot: SlotView) -> tuple[str, ...]:
    """Return the facts of a slot apart from its numbers, in words that may stand alone each:
    dtype, shape (the global one, or the ranks' own where the layout is unknown), layout, device,
    how many different values ranks hold, what ranks of one node differ in."""
    facts = slot.facts
    global_shape = facts.global_shape
    shapes = {piece.shape for piece in slot.pieces} if global_shape is None else {global_shape}
    layout = " ".join(f"{axis}={text}" for axis, text in facts.placements)
    differing = ", ".join(slot.disagreement)
    return (
        facts.dtype,
        " or ".join(str(list(shape)) for shape in sorted(shapes)),
        f"{layout} on mesh {facts.mesh}" if layout else "of no known layout",
        f"on {facts.device}",
        f"of {counted(slot.distinct, 'value')} over the ranks",
        f"other {differing} by rank" if differing else "alike on its ranks",
    )


def _issued(facts: Mapping[str, Any]) -> str:
    """Return a collective without the names of its ranks: layers on other ranks are alike."""
    reduce = f"({facts['reduce']})" if facts.get("reduce") else ""
    return f"{facts.get('op', 'collective')}{reduce} over {len(facts.get('members', ()))}"


def numbered_groups(
    modules: Sequence[ModuleOutline], standing: Mapping[str, Hashable]
) -> list[list[AlikeModules]]:
    """Return modules in groups that may share a line: a list for each row of numbered siblings, and
    one for every other module.

    Alike modules are in one group where they stand side by side. A row with too many groups has
    one for each kind instead, wherever its modules stand; with too many kinds, one for all modules
    of equal standing. `standing`: by path, a caller's own mark; modules share a group where it is
    equal.
    """
    rows: dict[str, list[ModuleOutline]] = {}
    for module in modules:
        stem = f"{module.path.rpartition('.')[0]}."
        rows.setdefault(module.path if module.number is None else stem, []).append(module)
    # stages of a pipeline call theirs at the same time, so calls are in no order
    in_order = (sorted(row, key=lambda module: module.number or 0) for row in rows.values())
    return [_grouped(row, standing) for row in in_order]


def number_of(part: str) -> int | None:
    """Return the place in a list that a part of a path says, None for another part."""
    is_number = part.isdecimal() and part.isascii() and len(part) < 10
    return int(part) if is_number else None


def _grouped(row: Sequence[ModuleOutline], standing: Mapping[str, Hashable]) -> list[AlikeModules]:
    def key(module: ModuleOutline) -> Hashable:
        return module.kind, standing.get(module.path)

    groups = [[*run] for _, run in itertools.groupby(row, key)]
    if len(groups) > _MOST_GROUPS:
        groups = _by(key, row)
    if len(groups) > _MOST_GROUPS:
        groups = _by(lambda module: standing.get(module.path), row)
    return [
        AlikeModules(modules=tuple(group), kinds=len({module.kind for module in group}))
        for group in groups
    ]


def _by(
    key: Callable[[ModuleOutline], Hashable], modules: Iterable[ModuleOutline]
) -> list[list[ModuleOutline]]:
    groups: dict[Hashable, list[ModuleOutline]] = {}
    for module in modules:
        groups.setdefault(key(module), []).append(module)
    return [*groups.values()]


def difference(
    module: ModuleOutline, model: ModuleOutline, inside: str = ""
) -> ModuleDifference | None:
    """Return the first thing in which two modules differ, those inside them last; None where they
    are alike. `inside`: the path to them from where the comparison began."""
    if module.kind == model.kind:
        return None
    sides = (module, model)
    if module.class_name != model.class_name:
        return ModuleDifference(inside, "", "class", *(side.class_name for side in sides))
    for name in sorted(module.children.keys() ^ model.children.keys()):
        names = (name if name in side.children else None for side in sides)
        return ModuleDifference(f"{inside}.{name}".lstrip("."), "", "module", *names)
    facts = sorted(module.facts.keys() | model.facts.keys(), key=_order)
    differing = (fact for fact in facts if module.facts.get(fact) != model.facts.get(fact))
    mismatch = None
    for fact in itertools.islice(differing, 1):
        mismatch = ModuleDifference(inside, *fact, *(side.facts.get(fact) for side in sides))
        if _order(fact)[0] <= len(_CALL_FACTS):
            return mismatch
    for name, child in module.children.items():
        below = difference(child, model.children[name], f"{inside}.{name}".lstrip("."))
        if below is not None:
            return below
    return mismatch


def _order(fact: Fact) -> tuple[int, int, str]:
    """Order facts as they come in a step: how a module is called, its inputs, what is inside."""
    phase, name = fact
    is_of_slot = len(_CALL_FACTS) + (name.split(".")[0] != "input")
    kind = _CALL_FACTS.index(name) if name in _CALL_FACTS else is_of_slot
    return kind, Phase[phase.upper()] if phase else 0, name
