"""Which values a list of names means: `layers.0.attn:output`, `layers.*`, `fc:param:weight`.

A name is split at its first colon (at a later one where a path has a colon); without a slot it
means all slots of that path. What a name does not say is taken as a person would mean it: inputs
and outputs of the first traced step, parameters after it, gradients before the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rankscope.errors import SelectionError
from rankscope.globs import glob_matches, slot_matches
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.tree.selection import default_phase, nothing_matched
from rankscope.tree.views import Node, Step, Trace, Value

_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Names, and what narrows them; None is what was not asked for: the first traced step, train
    (or eval where there is no train step), the phase of the slot, the only ordinal."""

    names: tuple[str, ...]
    step: int | None = None
    mode: Mode | None = None
    micro_batch: int = 0
    phase: Phase | None = None
    ordinal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One value that a name means; `is_named` where the name has a slot and no glob."""

    key: str
    """The name as it was asked where it means this value alone, else path and slot."""
    value: Value
    is_named: bool


@dataclass(slots=True)
class _Name:
    """One name, and the nodes that have what it means, by path and slot."""

    text: str
    path: str
    slot: str
    found: dict[tuple[str, str], list[Node]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, paths: Collection[str]) -> _Name:
        """Split a name at its first colon, or at the first that gives a path: paths may hold colons
        too."""
        parts = text.split(":")
        split = []
        for end in range(1, len(parts) + 1):
            path, slot = ":".join(parts[:end]), ":".join(parts[end:])
            whole = end == len(parts)
            split.append(cls(text, "" if path == "(root)" else path, "*" if whole else slot))
        return next((each for each in split if any(map(each.takes_path, paths))), split[0])

    @property
    def is_glob(self) -> bool:
        return any(mark in self.path + self.slot for mark in "*?[")

    def takes_path(self, path: str) -> bool:
        return path == self.path or glob_matches(self.path, path)

    def takes_slot(self, slot: str) -> bool:
        return slot_matches(self.slot, slot)


def choose(trace: Trace, wanted: Wanted) -> tuple[list[Chosen], list[str]]:
    """Return the values that the names mean, each once, and what is to be said of the choice.
    Raises SelectionError where a name means nothing, or several calls; says what there is."""
    groups = _groups(trace, wanted)
    paths = {node.path for group in groups for node in group.walk()}
    names = [_Name.parse(text, paths) for text in dict.fromkeys(wanted.names)]
    for group in groups:
        for node in group.walk():
            _note(node, names, wanted)
    chosen: dict[str, Chosen] = {}
    notes: list[str] = []
    for name in names:
        if not name.found:
            raise _nothing(trace, name, wanted, groups)
        repeated = 0
        for (path, slot), nodes in name.found.items():
            node = _one_of(name, slot, nodes)
            repeated += len(nodes) > 1
            value = node.value(slot)
            assert value is not None
            if name.is_glob and value.dtype == "python":
                continue
            is_exact = not name.is_glob and slot == name.slot
            key = name.text if is_exact else f"{path or '(root)'}:{slot}"
            chosen.setdefault(key, Chosen(key=key, value=value, is_named=is_exact))
        if repeated:
            notes.append(
                f"{name.text}: {repeated} of these are called more than once; the first call is "
                f"taken, choose another with --ordinal"
            )
    return [*chosen.values()], notes


def _groups(trace: Trace, wanted: Wanted) -> Sequence[Step]:
    """Return the groups that are looked at; of one step in several lives of the ranks all."""
    if wanted.phase is Phase.SETUP:
        return trace.setup
    mode = trace.default_mode if wanted.mode is None else wanted.mode
    steps = [step for step in trace.steps if step.mode is mode]
    number = min((s.step for s in steps), default=0) if wanted.step is None else wanted.step
    found = [step for step in steps if step.step == number]
    if not found:
        held = ", ".join(
            f"{each.word} {ranks_text(s.step for s in trace.steps if s.mode is each)}"
            for each in Mode
            if any(s.mode is each for s in trace.steps)
        )
        raise SelectionError(
            f"the trace holds no {mode.word} step"
            f"{'' if wanted.step is None else f' {wanted.step}'}; it holds "
            f"{held or 'the setup alone: ask for that with --phase setup'}"
        )
    return found


def _note(node: Node, names: Iterable[_Name], wanted: Wanted) -> None:
    """Remember a node by the names that mean it; a later life of the ranks goes before."""
    if node.micro_batch not in (None, wanted.micro_batch):
        return
    path, phase = node.path, node.phase
    if wanted.phase not in (None, phase):
        return
    for name in names:
        if not name.takes_path(path):
            continue
        for slot in dict.fromkeys(view.slot for view in node.slots):
            meant = default_phase(slot) if wanted.phase is None else wanted.phase
            if not name.takes_slot(slot) or meant is not phase:
                continue
            if wanted.ordinal not in (None, node.ordinal):
                continue
            nodes = name.found.setdefault((path, slot), [])
            if nodes and nodes[0].head.incarnation < node.head.incarnation:
                nodes.clear()
            nodes.append(node)


def _one_of(name: _Name, slot: str, nodes: list[Node]) -> Node:
    if len(nodes) > 1 and not name.is_glob:
        first = nodes[0]
        raise SelectionError(
            f"{name.text!r} means {len(nodes)} calls: {first.path or '(root)'} has {slot} in "
            f"{first.phase.word} {len(nodes)} times in {first.head.words}; choose one with "
            f"--ordinal {ranks_text(node.ordinal for node in nodes)}"
        )
    return min(nodes, key=lambda node: node.ordinal)


def _nothing(trace: Trace, name: _Name, wanted: Wanted, groups: Sequence[Step]) -> SelectionError:
    """Return the error for a name that means nothing here: near names, or where else it is."""
    paths, slots, places = set[str](), set[str](), dict[str, None]()
    for node in trace.walk():
        paths.add(node.path)
        if not name.takes_path(node.path):
            continue
        own = {view.slot for view in node.slots}
        slots |= own
        if any(map(name.takes_slot, own)):
            places[" ".join(_place_words(node))] = None
    if not any(map(name.takes_path, paths)):
        return nothing_matched("path", name.path, paths)
    if not places:
        return nothing_matched(f"slot of {name.path or '(root)'}", name.slot, slots)
    listed = [*places]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    phase = (default_phase(name.slot) if wanted.phase is None else wanted.phase).word
    return SelectionError(
        f"{name.text!r} is not in {phase} of {groups[0].head.words}, micro-batch "
        f"{wanted.micro_batch}; it is in: {'; '.join(listed[:_SHOWN])}{more}"
    )


def _place_words(node: Node) -> Iterator[str]:
    yield f"--phase {node.phase.word}"
    if node.phase is not Phase.SETUP:
        yield f"--mode {node.head.mode.word} --step {node.head.step}"
    if node.micro_batch is not None:
        yield f"--micro-batch {node.micro_batch}"
    if node.ordinal:
        yield f"--ordinal {node.ordinal}"
