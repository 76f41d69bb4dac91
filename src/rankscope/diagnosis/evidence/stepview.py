"""One step of a trace as the rules look at it: calls, and their values over all ranks as arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import Mode
from rankscope.record.notes import RanksNote
from rankscope.record.phases import Phase
from rankscope.record.statistics import NONFINITE
from rankscope.record.value import ValueFlag, is_form
from rankscope.tree.slotview import Fold, SlotView, by_slot
from rankscope.tree.views import Node, Step

Array = NDArray[Any]
ParameterCall = tuple[tuple[str, str], int]
"""Path and name of a parameter, and the call of its module."""
_NO_VALUE: Final = (
    ValueFlag.ABSENT
    | ValueFlag.PENDING
    | ValueFlag.STRUCTURE_ONLY
    | ValueFlag.UNSEEN
    | ValueFlag.PYTHON
)
_ABSENT: Final = "absent"
_NUMBER: Final = re.compile(r"(^|\.)\d+(?=\.|$)")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return {key: its values}, both in order."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def sibling_path(path: str) -> str:
    """Return what a path has in common with its siblings: layers.0.mlp -> layers.*.mlp."""
    return _NUMBER.sub(r"\1*", path)


def layer_of(path: str) -> str:
    """Return the path up to its first number, the layer that a module is part of: "" for none."""
    number = _NUMBER.search(path)
    return path[: number.end()] if number else ""


def is_below(path: str, outer: str) -> bool:
    """True for the path of a module and those inside of it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def root_of(path: str) -> str:
    """Return what tells the roots of a job apart: the first has no name of its own."""
    return path.partition(".")[0] if path.startswith("@") else ""


def is_input(slot: str, phase: Phase) -> bool:
    """True for what a call begins with: its inputs, in backward the gradients of its outputs."""
    head = slot.split(".")[0]
    return head == ("grad_output" if phase is Phase.BACKWARD else "input")


def is_output(slot: str, phase: Phase) -> bool:
    """True for what a call ends with; `returned` is such a value."""
    head = slot.split(".")[0]
    if phase is Phase.BACKWARD:
        return head == "grad_input"
    return head in ("output", "returned")


def positions(ranks: Array, members: Array) -> Array:
    """Return where ranks stand among sorted ones, -1 for those that do not."""
    places = np.minimum(np.searchsorted(ranks, members), len(ranks) - 1)
    return np.where(ranks[places] == members, places, -1)


def are_known(is_digested: Array, flags: Array) -> Array:
    """Return True where a value with these flags has numbers."""
    is_known: Array = is_digested & ((flags & int(_NO_VALUE)) == 0)
    return is_known


class SlotValues:
    """One slot of one call over all its ranks. Arrays are in order of rank."""

    def __init__(self, call: CallView, views: list[SlotView]) -> None:
        self.call = call
        self.slot = views[0].slot
        self.views = views
        self._columns = views[0].step.columns
        self._rows: slice | Array
        if len(views) == 1:
            self._rows = views[0].rows
        else:
            self._rows = np.concatenate([np.arange(v.rows.start, v.rows.stop) for v in views])
        self.ranks, self._order = views[0].step.by_rank(self._rows)

    @property
    def pieces(self) -> Iterator[Fold]:
        """Of all ranks."""
        return (piece for view in self.views for piece in view.pieces)

    @property
    def parameter(self) -> tuple[str, str]:
        """Path and name of the parameter that this is, or is the gradient of."""
        return self.call.path, self.slot.partition(":")[2]

    @property
    def parameter_call(self) -> ParameterCall:
        """The same of one call of its module."""
        return self.parameter, self.call.ordinal

    @property
    def name(self) -> str:
        """Path and slot, as people write them and the trace has them."""
        return f"{self.call.node.path or '(root)'}:{self.slot}"

    def column(self, name: str) -> Array:
        """Return one column of values, for these ranks."""
        rows = self._columns[f"values.{name}"][self._rows]
        return rows if self._order is None else rows[self._order]

    def digests(self) -> Array:
        """Return the numbers of these ranks as a structured array."""
        rows = self.views[0].step.digests(self._rows)
        return rows if self._order is None else rows[self._order]

    @cached_property
    def hashes(self) -> Array:
        """uint64 of each rank."""
        return self.column("hash")

    @cached_property
    def counts(self) -> Array:
        """Elements of each rank."""
        return self.column("count")

    @cached_property
    def flags(self) -> Array:
        """ValueFlag bits of each rank."""
        return self.column("flags")

    @property
    def needs_gradient(self) -> bool:
        """True where a gradient of it was needed on some rank."""
        return any(piece.requires_grad for piece in self.pieces)

    @cached_property
    def is_known(self) -> Array:
        """[n] True where the value was digested."""
        return are_known(self.column("digested"), self.flags)

    @cached_property
    def has_elements(self) -> Array:
        """[n] True where it was digested, and has an element."""
        is_filled: Array = self.is_known & (self.counts > 0)
        return is_filled

    @cached_property
    def nonfinite(self) -> Array:
        """[n] elements that are NaN or +inf; -inf alone is how masks are written."""
        counts: Array = (self.column("nan") + self.column("posinf")) * self.is_known
        return counts

    @property
    def rms(self) -> Array:
        """[n] root mean square of each rank's elements."""
        sizes: Array = self.column("l2") / np.sqrt(np.maximum(self.counts, 1))
        return sizes

    @cached_property
    def is_all_nonfinite(self) -> bool:
        """All elements of all ranks are NaN or infinite: equal whatever should have stood there."""
        low = self.column("min")[self.has_elements]
        return bool(len(low) and np.isnan(low).all())

    @cached_property
    def is_constant(self) -> bool:
        """True where no rank holds two different elements: as equal on shards as on replicas."""
        return not bool((self.is_known & (self.column("min") < self.column("max"))).any())

    @cached_property
    def dtype(self) -> str:
        """Of the lowest rank that has the value: the entry of one without gradient has no dtype."""
        if len(self.views) > 1:
            dtypes = (view.dtype for view in self.views if not _is_absent(view))
            return next(dtypes, self.views[0].dtype)
        return self.views[0].dtype

    @cached_property
    def source(self) -> str:
        """Where the layout comes from, "mixed" where ranks with a gradient differ in that."""
        sources = {view.source.value for view in self.views}
        if len(sources) > 1:
            present = (view for view in self.views if not _is_absent(view))
            sources = {view.source.value for view in present} or sources
        return sources.pop() if len(sources) == 1 else "mixed"

    def at(self, ranks: Array) -> Array:
        """Return the positions of ranks in the arrays, -1 for those that hold nothing."""
        return positions(self.ranks, ranks)

    def place(self, rank: int) -> int:
        """Return the position of one rank."""
        return int(self.at(np.array([rank]))[0])

    def has(self, ranks: Array) -> bool:
        """True where all of these ranks hold the value."""
        return bool((self.at(ranks) >= 0).all())

    def times(self, ranks: Array) -> Array:
        """Return when the value was there on these ranks, in ns by each one's own clock. What hooks
        made of an output is there just after it; so is what came out of a collective, because its
        end is when the others reach this rank. A gradient has the time of its tensor hook. Setup,
        gradients and parameters are one event each: their values have no order."""
        call = self.call
        if call.phase is Phase.BACKWARD:
            return self.column("time_ns")[np.maximum(self.at(ranks), 0)]
        if is_input(self.slot, call.phase):
            return call.times(ranks)
        late = int(self.slot.startswith("returned") or call.phase is Phase.COLLECTIVE)
        return call.times(ranks, is_end=True) + late

    def are_known(self, ranks: Array) -> bool:
        """True where all of these ranks hold it, and it was digested on each."""
        places = self.at(ranks)
        return bool((places >= 0).all() and self.is_known[places].all())

    def is_finite(self, ranks: Array) -> bool:
        """True where none of these ranks, which hold it, has NaN or infinity in it."""
        places = self.at(ranks)
        return not any(self.column(name)[places].any() for name in NONFINITE)

    def equals(self, values: SlotValues, ranks: Array) -> bool:
        """True where each of these ranks holds the same bytes in both."""
        at, places = self.at(ranks), values.at(ranks)
        is_there = (at >= 0).all() and (places >= 0).all()
        return bool(is_there and (self.hashes[at] == values.hashes[places]).all())

    def told(self, rank: int) -> tuple[int, bool] | None:
        """Return a rank's hash, and whether an accelerator made it; None where it is not known."""
        place = self.place(rank)
        if place < 0 or not self.is_known[place]:
            return None
        return int(self.hashes[place]), bool(self.flags[place] & ValueFlag.MIX64)

    def agreements(self, groups: Array) -> Array:
        """Return [g] for `groups` of shape [g, n]: 1 where a group holds the same bytes, 0 where
        not, -1 where that is not known."""
        places = self.at(groups)
        is_known = (places >= 0).all(1) & self.is_known[places].all(1)
        kinds = self.flags[places] & int(ValueFlag.MIX64)
        is_known &= (kinds == kinds[:, :1]).all(1)
        hashes, counts = self.hashes[places], self.counts[places]
        is_same = ((hashes == hashes[:, :1]) & (counts == counts[:, :1])).all(1)
        return np.where(is_known, is_same, -1).astype(np.int8)

    def agree(self, ranks: Array) -> bool | None:
        """Say whether these ranks hold the same bytes; None where one is not known."""
        answer = int(self.agreements(ranks[None])[0])
        return None if answer < 0 else bool(answer)


def _is_absent(view: SlotView) -> bool:
    return all(_ABSENT in fold.flags for fold in view.pieces)


@dataclass(slots=True, eq=False, repr=False)
class CallView:
    """One node with its place in the tree."""

    node: Node
    path: str
    """As the reference has it, where a trace is held to one."""
    phase: Phase
    micro_batch: int | None
    ordinal: int
    parent: CallView | None
    ranks: Array
    top: CallView = field(init=False)
    children: list[CallView] = field(default_factory=list)
    slots: dict[str, SlotValues] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.top = self if self.parent is None else self.parent.top

    @property
    def identity(self) -> tuple[str, int | None, int]:
        """Path, micro-batch and ordinal: what a call in forward and the one in backward share."""
        return self.path, self.micro_batch, self.ordinal

    @property
    def around(self) -> Iterator[CallView]:
        """The calls that it is made in, innermost first."""
        outer = self.parent
        while outer is not None:
            yield outer
            outer = outer.parent

    @property
    def inputs(self) -> Iterator[SlotValues]:
        """Tensors that the call begins with."""
        return (h for s, h in self.slots.items() if is_input(s, self.phase) and h.dtype != "python")

    @property
    def outputs(self) -> Iterator[SlotValues]:
        """Tensors that the call ends with."""
        tensors = ((s, h) for s, h in self.slots.items() if h.dtype != "python")
        return (values for slot, values in tensors if is_output(slot, self.phase))

    def is_given_the_same(self, ranks: Array) -> bool:
        """True where it has inputs, and all of them are the same bytes on these ranks."""
        answers = [values.agree(ranks) for values in self.inputs]
        return bool(answers) and all(answers)

    def column(self, name: str, ranks: Array) -> Array:
        """Return one column of calls on these ranks."""
        step, rows = self.node.step, self.node.call_rows
        call_ranks = step["calls.rank"][rows]
        places = np.minimum(np.searchsorted(call_ranks, ranks), len(call_ranks) - 1)
        column: Array = step[f"calls.{name}"][rows][places]
        return column

    def span(self, ranks: Array) -> tuple[Array, Array]:
        """Return begin and end on these ranks, in ns; where an end was not recorded, its begin."""
        start = self.column("start_ns", ranks)
        return start, start + np.maximum(self.column("duration_ns", ranks), 0)

    def times(self, ranks: Array, *, is_end: bool = False) -> Array:
        """Return when it began or ended; parts of an event are there when the event begins."""
        is_event = self.phase.facts.is_event
        begin, end = (self.top if is_event else self).span(ranks)
        return end if is_end and not is_event else begin


@dataclass(frozen=True, eq=False)
class StepView:
    """One step of one mode, or a setup: every call, parents first."""

    is_setup: bool
    mode: Mode
    step: int
    incarnation: int
    notes: tuple[RanksNote, ...]
    calls: list[CallView]
    """But for those of phase `accumulated`."""
    left_by_passes: tuple[CallView, ...] = ()
    """Gradients as backward passes left them: what differs is not yet reduced."""

    @cached_property
    def _by_path(self) -> dict[str, list[CallView]]:
        return grouped((call.path, call) for call in self.calls)

    @cached_property
    def roots(self) -> list[CallView]:
        """The outermost forward calls."""
        return [call for call in self.of(Phase.FORWARD) if call.parent is None]

    @cached_property
    def trained_roots(self) -> list[CallView]:
        """The calls of the root that samples go into: the largest one where the step calls it, else
        the first (a frozen teacher is larger than its student, and runs in steps of its own)."""
        largest = [c for c in self.roots if not c.path] or [
            c for c in self.roots if not c.node.path
        ]
        paths = {call.path for call in (largest or self.roots)[:1]}
        return [call for call in self.roots if call.path in paths]

    @cached_property
    def same_inputs(self) -> tuple[Array, ...]:
        """The groups of ranks with bitwise the same root inputs in every micro-batch of the step.
        Only their activations may be compared."""
        keys: dict[int, list[int]] = {}
        for number, call in enumerate(self.roots):
            for values in call.inputs:
                for rank, number_of_rank, is_digested in zip(
                    values.ranks.tolist(), values.hashes.tolist(), values.is_known.tolist()
                ):
                    keys.setdefault(rank, []).extend(
                        (number, number_of_rank if is_digested else -1 - rank)
                    )
        groups = grouped((tuple(key), rank) for rank, key in sorted(keys.items()))
        return tuple(np.array(g, np.int64) for g in groups.values() if len(g) > 1)

    @cached_property
    def dropouts(self) -> list[CallView]:
        """Forward calls of modules that draw random numbers."""
        forwards = self.of(Phase.FORWARD)
        return [call for call in forwards if "dropout" in call.node.class_name.lower()]

    @cached_property
    def stepped(self) -> dict[str, set[int]]:
        """{path of a root: the ranks whose optimizers stepped it}"""
        by_root: dict[str, set[int]] = {}
        for call in self.of(Phase.GRADS):
            if call.parent is None:
                by_root.setdefault(call.path, set()).update(call.ranks.tolist())
        return by_root

    def has_same_inputs(self, group: Array) -> bool:
        """True where all of these ranks were handed the same in every micro-batch."""
        return any(np.isin(group, ranks).all() for ranks in self.same_inputs)

    @cached_property
    def gradient_families(self) -> dict[tuple[str, str], list[SlotValues]]:
        """{(path that siblings have in common, slot): gradients of these}"""
        return grouped(((sibling_path(h.call.path), h.slot), h) for h in self.values(Phase.GRADS))

    def handed(self, path: str) -> list[SlotValues]:
        """Return what a module was handed in forward and backward."""
        calls = (c for c in self.named(path) if c.phase in (Phase.FORWARD, Phase.BACKWARD))
        return [values for call in calls for values in call.inputs]

    def named(self, path: str) -> list[CallView]:
        """Return the calls of one path, in all phases."""
        return self._by_path.get(path, [])

    def of(self, *phases: Phase) -> Iterator[CallView]:
        """Yield the calls of some phases."""
        return (call for call in self.calls if call.phase in phases)

    def values(self, *phases: Phase) -> Iterator[SlotValues]:
        """Yield the tensors of some phases."""
        all_values = (values for call in self.of(*phases) for values in call.slots.values())
        return (values for values in all_values if values.dtype != "python")

    def sent(self, group: Array, hashes: Array) -> int | None:
        """Return which of these hashes a collective gave all of these ranks, the last where there
        are several, None for none: an owner steps a parameter, and the others use what it sends.
        One call that gives them several of these gathers pieces, or what is then averaged."""
        last = None
        for call in self.of(Phase.COLLECTIVE):
            shared = (out.hashes[out.at(group)[0]] for out in call.outputs if out.agree(group))
            sent = {int(number) for number in shared if number in hashes}
            last = sent.pop() if len(sent) == 1 else last
        return last

    def parameters(self, phase: Phase) -> Iterator[SlotValues]:
        """Yield what modules own, at setup or behind an optimizer step."""
        return (values for values in self.values(phase) if values.slot.startswith("param:"))

    def gradients(self) -> Iterator[SlotValues]:
        """Yield the gradients of parameters that optimizers took."""
        return (h for h in self.values(Phase.GRADS) if h.slot.startswith("grad:"))


def step_view_of(step: Step) -> StepView:
    """Read one step. Nothing of the trace keeps it: it goes when the caller lets it go."""
    ranks_of: dict[str, Array] = {}
    calls: list[CallView] = []

    waiting: list[tuple[Node, CallView | None]] = [(top, None) for top in reversed(step.fresh())]
    while waiting:
        node, parent = waiting.pop()
        text = node.ranks_text
        if text not in ranks_of:
            ranks_of[text] = np.array(node.ranks, np.int64)
        entries = by_slot(view for view in node.slots if not is_form(view.slot))  # each rank's own
        call = CallView(
            node, node.path, node.phase, node.micro_batch, node.ordinal, parent, ranks_of[text]
        )
        call.slots = {slot: SlotValues(call, views) for slot, views in entries.items()}
        calls.append(call)
        if parent is not None:
            parent.children.append(call)
        waiting.extend((child, call) for child in reversed(node.children))
    return StepView(
        is_setup=step.is_setup,
        mode=step.mode,
        step=0 if step.is_setup else step.step,
        incarnation=step.incarnation,
        notes=step.notes,
        calls=[call for call in calls if call.phase is not Phase.ACCUMULATED],
        left_by_passes=tuple(call for call in calls if call.phase is Phase.ACCUMULATED),
    )
