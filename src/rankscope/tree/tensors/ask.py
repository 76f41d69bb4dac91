"""What `rankscope tensor` hands out: one rank's tensor, or the whole, of each value that is named.

A name (`layers.0.attn:output`, `layers.*`, `fc:param:weight`) is split at its first colon (at a
later one where a path has a colon); without a slot it means all slots of that path. What a name
does not say: inputs and outputs of the first traced step, parameters after it, gradients before the
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.errors import FolderError, LayoutError, SelectionError, TraceError
from rankscope.globs import glob_matches, slot_matches
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.run.files import free_place
from rankscope.spool.chunks.safetensors import Outgoing, write_tensors
from rankscope.tree.selection import default_phase, nothing_matched
from rankscope.tree.tensors.globalvalues import assembled, local_tensor, plan_whole
from rankscope.tree.tensors.kept import (
    held_shapes,
    references,
    stored_tensor,
    value_name,
    why_not_kept,
)
from rankscope.tree.views import Node, Step, Trace, Value

if TYPE_CHECKING:
    import torch

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
    nodes: dict[tuple[str, str], list[Node]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, paths: Collection[str]) -> _Name:
        """Split a name at its first colon that gives a path: paths may hold colons too."""
        parts = text.split(":")
        split = []
        for end in range(1, len(parts) + 1):
            path, slot = ":".join(parts[:end]), ":".join(parts[end:])
            is_path = end == len(parts)
            split.append(cls(text, "" if path == "(root)" else path, "*" if is_path else slot))
        return next((name for name in split if any(map(name.takes_path, paths))), split[0])

    @property
    def is_glob(self) -> bool:
        return any(mark in self.path + self.slot for mark in "*?[")

    def takes_path(self, path: str) -> bool:
        return path == self.path or glob_matches(self.path, path)

    def takes_slot(self, slot: str) -> bool:
        return slot_matches(self.slot, slot)


def choose(trace: Trace, query: Wanted) -> tuple[list[Chosen], list[str]]:
    """Return the values that the names mean, each once, and what is to be said of the choice.
    Raises SelectionError where a name means nothing, or several calls; says what there is."""
    groups = _groups(trace, query)
    paths = {node.path for group in groups for node in group.walk()}
    names = [_Name.parse(text, paths) for text in dict.fromkeys(query.names)]
    for group in groups:
        for node in group.walk():
            _note(node, names, query)
    chosen: dict[str, Chosen] = {}
    notes: list[str] = []
    for name in names:
        if not name.nodes:
            raise _nothing(trace, name, query, groups)
        repeated = 0
        for (path, slot), nodes in name.nodes.items():
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


def _groups(trace: Trace, query: Wanted) -> Sequence[Step]:
    """Return the groups that are looked at; of one step in several lives of the ranks all."""
    if query.phase is Phase.SETUP:
        return trace.setup
    mode = trace.default_mode if query.mode is None else query.mode
    steps = [step for step in trace.steps if step.mode is mode]
    number = min((s.step for s in steps), default=0) if query.step is None else query.step
    groups = [step for step in steps if step.step == number]
    if not groups:
        listed = ", ".join(
            f"{step_mode.word} {ranks_text(s.step for s in trace.steps if s.mode is step_mode)}"
            for step_mode in Mode
            if any(s.mode is step_mode for s in trace.steps)
        )
        raise SelectionError(
            f"the trace holds no {mode.word} step"
            f"{'' if query.step is None else f' {query.step}'}; it holds "
            f"{listed or 'the setup alone: ask for that with --phase setup'}"
        )
    return groups


def _note(node: Node, names: Iterable[_Name], query: Wanted) -> None:
    """Remember a node by the names that mean it; a later life of the ranks goes before."""
    if node.micro_batch not in (None, query.micro_batch):
        return
    path, phase = node.path, node.phase
    if query.phase not in (None, phase):
        return
    for name in names:
        if not name.takes_path(path):
            continue
        for slot in dict.fromkeys(view.slot for view in node.slots):
            meant = default_phase(slot) if query.phase is None else query.phase
            if not name.takes_slot(slot) or meant is not phase:
                continue
            if query.ordinal not in (None, node.ordinal):
                continue
            nodes = name.nodes.setdefault((path, slot), [])
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


def _nothing(trace: Trace, name: _Name, query: Wanted, groups: Sequence[Step]) -> SelectionError:
    """Return the error for a name that means nothing here: near names, or where else it is."""
    paths, slots, places = set[str](), set[str](), dict[str, None]()
    for node in trace.walk():
        paths.add(node.path)
        if not name.takes_path(node.path):
            continue
        node_slots = {view.slot for view in node.slots}
        slots |= node_slots
        if any(map(name.takes_slot, node_slots)):
            places[" ".join(_place_words(node))] = None
    if not any(map(name.takes_path, paths)):
        return nothing_matched("path", name.path, paths)
    if not places:
        return nothing_matched(f"slot of {name.path or '(root)'}", name.slot, slots)
    listed = [*places]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    phase = (default_phase(name.slot) if query.phase is None else query.phase).word
    return SelectionError(
        f"{name.text!r} is not in {phase} of {groups[0].head.words}, micro-batch "
        f"{query.micro_batch}; it is in: {'; '.join(listed[:_SHOWN])}{more}"
    )


def _place_words(node: Node) -> Iterator[str]:
    yield f"--phase {node.phase.word}"
    if node.phase is not Phase.SETUP:
        yield f"--mode {node.head.mode.word} --step {node.head.step}"
    if node.micro_batch is not None:
        yield f"--micro-batch {node.micro_batch}"
    if node.ordinal:
        yield f"--ordinal {node.ordinal}"


_MOST_LEFT_OUT = 5
_WORST_FIRST = (TraceError, LayoutError, SelectionError)  # kept and unreadable ... never kept
Say = Callable[[str], None]
"""Told, one line each, what was inferred, left out, or found to differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTensor:
    """One tensor to hand out, made when it is wanted; `whence` says whose it is."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    whence: str
    make: Callable[[], torch.Tensor]


def asked_tensors(
    trace: Trace,
    query: Wanted,
    say: Say,
    *,
    rank: int | None = None,
    is_global: bool = False,
    layouts: LayoutFile | None = None,
) -> list[AskedTensor]:
    """Return the tensors that were asked for: one rank's (None: of the only one that has it), or
    put together from all.

    What a glob takes and cannot be handed out is left out and said; a name that means one value has
    to give it. SelectionError: a name means nothing, or was not kept; says why; LayoutError:
    nothing says how pieces belong together, or they contradict it; TraceError: bytes cannot be
    found.
    """
    traced = {int(choice["rank"]) for choice in trace.run["ranks"]}
    if rank is not None and rank not in traced:
        raise SelectionError(f"--rank {rank}: the trace holds ranks {ranks_text(traced)}")
    chosen, notes = choose(trace, query)
    for line in notes:
        say(line)
    asked: list[AskedTensor] = []
    left_out: list[tuple[int, str]] = []
    for choice in chosen:
        try:
            asked.append(
                _global(choice, layouts, say)
                if is_global
                else _local(choice, _rank_of(choice, rank))
            )
        except (SelectionError, LayoutError, TraceError) as error:
            if choice.is_named:
                raise
            badness = next(i for i, kind in enumerate(_WORST_FIRST) if isinstance(error, kind))
            left_out.append((badness, str(error)))
    left_out.sort(key=lambda choice: choice[0])
    for _, line in left_out[:_MOST_LEFT_OUT] if asked else ():
        say(f"left out: {line}")
    if asked and len(left_out) > _MOST_LEFT_OUT:
        say(f"left out: {len(left_out) - _MOST_LEFT_OUT} more")
    if not asked:
        reason = left_out[0][1] if left_out else "none of these is a tensor"
        more = f" (and {len(left_out) - 1} more like it)" if len(left_out) > 1 else ""
        raise SelectionError(f"nothing to hand out: {reason}{more}")
    return asked


def save_tensors(out: Path, asked: Iterable[AskedTensor], *, is_forced: bool = False) -> int:
    """Write tensors under their keys, and return the size of the file. A file that is there is
    replaced where `is_forced` says so. FolderError: something is there, or it cannot be written."""
    from rankscope.tree.tensors.rebuild import bytes_of

    def outgoing(tensor: AskedTensor) -> Outgoing:
        return tensor.key, tensor.dtype, tensor.shape, lambda: bytes_of(tensor.make())

    try:
        target = free_place(out, is_forced=is_forced)
        return write_tensors(target, [outgoing(tensor) for tensor in asked])
    except OSError as error:
        raise FolderError(
            f"--out {out}: cannot be written: {error.strerror or error}; nothing was left there: "
            "make room, or give another name"
        ) from error


def printed(asked: Iterable[AskedTensor]) -> Iterator[tuple[str, str]]:
    """Yield a headline and the numbers of each tensor; of large ones the edges."""
    for t in asked:
        yield (f"{t.key}  {t.dtype}{list(t.shape)}  {t.whence}", str(t.make()))


def _rank_of(choice: Chosen, rank: int | None) -> int:
    if rank is not None:
        return rank
    ranks = sorted(references(choice.value))
    if not ranks:
        raise SelectionError(why_not_kept(choice.value, choice.value.ranks))
    if len(held_shapes(choice.value)) > 1:
        raise SelectionError(
            f"{value_name(choice.value)} is on ranks {ranks_text(held_shapes(choice.value))}: ask "
            f"for one with --rank {ranks[0]}, or for the global tensor with --global"
        )
    return ranks[0]


def _local(choice: Chosen, rank: int) -> AskedTensor:
    value = choice.value
    if rank not in references(value):
        raise SelectionError(why_not_kept(value, [rank]))
    tensor = stored_tensor(value, rank, references(value)[rank])
    return AskedTensor(
        key=choice.key,
        dtype=tensor.dtype,
        shape=tensor.shape,
        whence=f"of rank {rank}",
        make=lambda: local_tensor(value, rank, is_checked=True),
    )


def _global(choice: Chosen, layouts: LayoutFile | None, say: Say) -> AskedTensor:
    planned = plan_whole(choice.value, layouts)

    def made() -> torch.Tensor:
        result = assembled(choice.value, planned.plan)
        for mismatch in result.mismatches:
            say(f"{choice.key}: {mismatch}")
        return result.tensor

    for note in planned.notes:
        say(f"{choice.key}: {note}")
    return AskedTensor(
        key=choice.key,
        dtype=planned.dtype,
        shape=planned.plan.global_shape,
        whence=f"global, from ranks {ranks_text(planned.plan.ranks)}",
        make=made,
    )
