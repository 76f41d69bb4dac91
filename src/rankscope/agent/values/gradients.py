"""Gradients of activations, by one hook a tensor, and gradients of parameters as each backward pass
of a step left them.

The hooks on activations tell where a backward pass begins, and torch's own queue of functions for
the end of a pass where it ends. What a pass left is read then. It is written only where it tells
more than the optimizer's own gradients: another value (clipping, averaging, unscaling by hand), or
an earlier pass whose gradients were gone when a later one began.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rankscope.agent.guard import Guard
from rankscope.agent.hooks.modules import ModuleInfo, Root, gradient_of, own_parameters
from rankscope.agent.pythonstack import program_lines
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.rootevents import RootEvents
from rankscope.agent.values.valuereader import HeldValue, ValueReader
from rankscope.capture.torch_internals.autograd import (
    call_at_end_of_backward,
    current_graph_task,
    has_hook,
)
from rankscope.capture.torch_internals.distributed import is_flattened
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag


class GradientTarget(NamedTuple):
    """Where a gradient belongs: the forward call and the slot in it."""

    sequence: int
    path: str
    slot: str


MOST_FIRINGS = 1 << 16
"""Most backward passes of one graph that a record can number."""


@dataclass(eq=False, slots=True)
class _Watched:
    tensor: weakref.ReferenceType[torch.Tensor] | None
    """None for a leaf: torch refuses to swap a parameter that has a weak reference."""
    version: int
    """An in-place operation makes the same object another tensor to autograd."""
    targets: list[GradientTarget]
    is_view: bool
    """An in-place operation on a view gives it another place in the graph: the old one is gone."""
    is_of_root: bool = False
    firings: int = 0
    handle: torch.utils.hooks.RemovableHandle | None = None
    """Hook handle of a leaf, which outlives the graph: the hook must be removed again."""

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True where this was made for that very tensor, not for one at its address before."""
        if self.tensor is not None:
            return self.tensor() is tensor
        return self.handle is not None and has_hook(tensor, self.handle)


_TIMES_BEHIND = 3
"""Times we queue up again at the end of a pass: DDP and FSDP end their reductions in functions of
the same queue, and some of those queue another one."""


class GradientHooks:
    """Registers tensor hooks for one traced step; none changes a gradient. They also notice
    outermost backward passes: a pass inside another (reentrant checkpointing) leaves no final
    gradient."""

    def __init__(self, guard: Guard, recorder: Recorder, values: ValueReader) -> None:
        self._guard = guard
        self._recorder = recorder
        self._values = values
        self.begins: Callable[[], None] = lambda: None
        """Called when the first pass of a step reaches an output of a root, before any gradient of
        the root's parameters is added to."""
        self.pass_begins: Callable[[bool], None] = lambda is_before_all: None
        """Called when a pass reaches its first watched tensor; True where that is an output of a
        root, so that no gradient of the root's parameters has been added to yet."""
        self.pass_ends: Callable[[], None] = lambda: None
        """Called when a pass has added its last gradient, and data-parallel wrappers are done."""
        self._passes: set[int] = set()
        """Running passes by torch's number of the graph task."""
        self._has_begun = False
        self._watched: dict[int, _Watched] = {}
        self._rewritten: list[_Watched] = []
        """Tensors written in place and passed to a call again since they were watched."""
        self.has_fired = False

    def watch(
        self, tensor: torch.Tensor, target: GradientTarget, *, is_of_root: bool = False
    ) -> None:
        """Record the total gradient of `tensor` when backward reaches it."""
        if is_of_root and self._passes and current_graph_task() == -1:
            self._passes.clear()  # an exception ended them, and their end was never announced
        watched = self._watched.get(id(tensor))
        if watched is not None and watched.is_of(tensor):
            if watched.version == tensor._version:
                watched.targets.append(target)
                watched.is_of_root |= is_of_root
                return
            self._rewritten.append(watched)
        is_leaf = tensor.grad_fn is None
        watched = _Watched(
            None if is_leaf else weakref.ref(tensor), tensor._version, [target], tensor._is_view(),
            is_of_root,
        )  # fmt: skip
        self._watched[id(tensor)] = watched

        def fired(gradient: torch.Tensor, watched: _Watched = watched) -> None:
            ordinal = watched.firings  # double backward and retain_graph fire again
            watched.firings += 1
            self.has_fired = True
            self._note_pass(watched.is_of_root)
            if watched.is_of_root and not self._has_begun:
                self._has_begun = True
                self.begins()
            if ordinal < MOST_FIRINGS:
                with invisible():
                    for sequence, path, slot in watched.targets:
                        self._values.read(
                            gradient, sequence, path, slot, Phase.BACKWARD, ordinal=ordinal
                        )
            elif ordinal == MOST_FIRINGS:
                sequence, _, slot = watched.targets[0]
                lack = f"backward ran {MOST_FIRINGS} times; later gradients are not recorded"
                self._recorder.error(sequence, f"{slot}: {lack}")

        # the hook lives in the graph, so `fired` refers to no tensor: it would keep the graph alive
        handle = tensor.register_hook(self._guard.hook(fired))  # type: ignore[no-untyped-call]  # torch
        if is_leaf:
            watched.handle = handle

    def _note_pass(self, is_of_root: bool) -> None:
        task = current_graph_task()
        if task == -1 or task in self._passes:
            return
        # a pass inside another (reentrant checkpointing) begins and ends no pass of the step
        is_outermost = not self._passes
        self._passes.add(task)
        self._ask_for_end(task, _TIMES_BEHIND)
        if is_outermost:
            self.pass_begins(is_of_root)

    def _ask_for_end(self, task: int, times_behind: int) -> None:
        def at_end() -> None:
            if times_behind:
                self._ask_for_end(task, times_behind - 1)
                return
            self._passes.discard(task)
            if not self._passes:
                self.pass_ends()

        call_at_end_of_backward(self._guard.hook(at_end))

    def unseen(self) -> list[GradientTarget]:
        """Return the gradients that no hook can have seen: of views that were written in place."""
        if not self.has_fired:
            return []
        rewritten = (w for w in self._watched.values() if w.is_view and _is_rewritten(w))
        return [
            target
            for watched in (*self._rewritten, *rewritten)
            if watched.is_view and not watched.firings
            for target in watched.targets
        ]

    def forget(self) -> None:
        """Take the hooks off leaves and forget the step; those on others go with their graph."""
        for watched in (*self._watched.values(), *self._rewritten):
            if watched.handle is not None:
                watched.handle.remove()
        self._watched.clear()
        self._rewritten.clear()
        self.has_fired = self._has_begun = False


def _is_rewritten(watched: _Watched) -> bool:
    tensor = watched.tensor() if watched.tensor is not None else None
    return tensor is not None and tensor._version != watched.version


_RESTARTED, _NO_SYNC = int(ValueFlag.RESTARTED), int(ValueFlag.NO_SYNC)
_SAME_LINES = int(ValueFlag.SAME_LINES)
_MOST_FORWARDS = 64


@dataclass(slots=True)
class _LeftGradient:
    info: ModuleInfo
    slot: str
    value: HeldValue
    parameter_state: tuple[int, int]
    flags: int
    is_written: bool = False


@dataclass(slots=True)
class _PassEnd:
    ordinal: int
    time_ns: int
    lines: tuple[int, ...]
    """Lines of the program that called its forwards: several where several roots make one loss,
    none where the previous pass shared the forward."""
    gradients: dict[int, _LeftGradient] = field(default_factory=dict)


class AccumulatedGradients:
    """Holds what the latest pass of a step left, and writes it where that is asked for."""

    def __init__(self, events: RootEvents) -> None:
        self._events = events
        self._table, self._values = events.table, events.values
        self.is_on = events.wants(Phase.GRADS) and events.wants(Phase.ACCUMULATED)
        self.running_step: Callable[[], int | None] = lambda: None
        """Number of the train step that is traced, None where nothing is to be read."""
        self._latest: _PassEnd | None = None
        self._count = 0
        self._vanished_gradients: set[int] = set()
        """Parameters whose gradient of an earlier pass had vanished when a later pass began."""
        self._lines: list[int] = []
        """Lines that called the forwards of passes which have not ended yet."""
        self._states_before: dict[int, tuple[int, int]] = {}
        """Identity of a parameter -> state of its gradient at the begin of the running pass."""
        self._untouched: set[int] = set()
        """Parameters whose gradient was untouched at the begin of the running pass."""
        self.unsynced: frozenset[int] | None = None
        """Parameters whose gradients the last pass was not to reduce; None before any ended."""

    def forward_begins(self) -> None:
        """Note from which lines of the program the forward of a root is called."""
        if self.is_on and len(self._lines) <= _MOST_FORWARDS:
            self._lines.append(program_lines())

    def pass_begins(self, is_before_all: bool) -> None:
        """Look what became of the gradients of the pass before."""
        step, latest = self.running_step(), self._latest
        self._untouched.clear()
        self._states_before.clear()
        if step is None or not is_before_all or not self.is_on:
            return
        gone = set()
        with invisible():
            for parameter in self._table.parameters():
                gradient = gradient_of(parameter)
                if gradient is not None:
                    self._states_before[id(parameter)] = self._values.state_of(gradient)
                before = latest.gradients.get(id(parameter)) if latest is not None else None
                if before is None:
                    continue
                if gradient is not None and self._values.state_of(gradient) == before.value.state:
                    self._untouched.add(id(parameter))
                elif self._is_wiped(parameter, gradient, before):
                    gone.add(id(parameter))
        if gone and latest is not None:
            self._write(latest, step)
            self._vanished_gradients |= gone

    def _is_wiped(
        self, parameter: torch.Tensor, gradient: torch.Tensor | None, before: _LeftGradient
    ) -> bool:
        """True if the gradient is gone without an optimizer step: the parameter is unchanged. FSDP1
        itself removes gradients of earlier passes during backward, and adds them later."""
        if is_flattened(parameter) or self._values.state_of(parameter) != before.parameter_state:
            return False
        return gradient is None or self._values.is_zero(gradient)

    def pass_ends(self) -> None:
        """Read the gradients that the pass left, if any."""
        lines = tuple(self._lines)
        self._lines.clear()
        if self.running_step() is None:
            return
        latest, ended = self._latest, _PassEnd(self._count, time.monotonic_ns(), lines)
        is_any_new = False
        restarted = _RESTARTED
        if latest is not None and lines == latest.lines and 0 < len(lines) <= _MOST_FORWARDS:
            restarted |= _SAME_LINES
        with invisible():
            self.unsynced = self._table.unsynced_parameters()
            for info, name, parameter in self._parameters():
                before = latest.gradients.get(id(parameter)) if latest else None
                entry = self._left_gradient(info, name, parameter, before, restarted)
                if entry is not None:
                    ended.gradients[id(parameter)] = entry
                    is_any_new |= entry is not before
        if is_any_new:
            self._latest, self._count = ended, self._count + 1
            self._vanished_gradients -= ended.gradients.keys()

    def _parameters(self) -> Iterator[tuple[ModuleInfo, str, torch.Tensor]]:
        for root in self._table.roots if self.is_on else ():
            for info, module in self._events.modules(root):
                parameters = own_parameters(module)
                for name in info.own_parameters:
                    parameter = parameters.get(name)
                    if parameter is not None and self._values.wants(f"grad:{name}"):
                        yield info, name, parameter

    def _left_gradient(
        self,
        info: ModuleInfo,
        name: str,
        parameter: torch.Tensor,
        before: _LeftGradient | None,
        restarted: int,
    ) -> _LeftGradient | None:
        """Return the current gradient, `before` itself if the pass did not touch it; None if it is
        unreadable or of an earlier step."""
        gradient = gradient_of(parameter)
        if gradient is None:
            return None
        state = self._values.state_of(gradient)
        if before is None and self._states_before.get(id(parameter)) == state:
            return None  # a pass that touches no gradient: `torch.autograd.grad`
        if before is not None and id(parameter) in self._untouched and before.value.state == state:
            return before
        value = self._values.hold(gradient)
        if value is None:
            return None
        flags = restarted if id(parameter) in self._vanished_gradients else 0
        if before is not None and not before.is_written:  # the pass before has no record of its own
            flags |= before.flags & (_RESTARTED | _SAME_LINES)
        if self.unsynced and id(parameter) in self.unsynced:
            flags |= _NO_SYNC
        return _LeftGradient(info, f"grad:{name}", value, self._values.state_of(parameter), flags)

    def left_gradients(self) -> Mapping[int, HeldValue]:
        """Return what the last pass left and no optimizer took, by identity of the parameter."""
        gradients = self._latest.gradients if self._latest is not None else {}
        return {key: entry.value for key, entry in gradients.items()}

    def write_untaken(self, step: int, gradients: Mapping[int, bool]) -> None:
        """Write the gradients of the last pass if an optimizer takes different ones: `gradients`
        says by identity of the parameter whether it takes those of the pass."""
        latest = self._latest
        if latest is None:
            return
        concerned = {key: entry for key, entry in latest.gradients.items() if key in gradients}
        if any(entry.flags & _RESTARTED or not gradients[key] for key, entry in concerned.items()):
            self._write(latest, step)
        for key in concerned:
            del latest.gradients[key]
        self._vanished_gradients -= gradients.keys()

    def forget(self) -> None:
        """Forget the passes so far: the step is over, or gradients are not accumulated in it."""
        self._latest, self._count = None, 0
        self._vanished_gradients.clear()
        self._lines.clear()
        self._untouched.clear()
        self._states_before.clear()
        self.unsynced = None

    def _write(self, end: _PassEnd, step: int) -> None:
        """Record what a pass left as one event of each root, at the time when the pass ended."""
        by_root: dict[Root, dict[ModuleInfo, list[_LeftGradient]]] = {}
        for entry in end.gradients.values():
            root = entry.info.root
            if root is not None and not entry.is_written:
                entry.is_written = True
                by_root.setdefault(root, {}).setdefault(entry.info, []).append(entry)

        def record(info: ModuleInfo, entry: _LeftGradient, sequence: int) -> None:
            flags = entry.flags
            self._values.record_held(entry.value, sequence, entry.slot, Phase.ACCUMULATED, flags)

        for root, modules in by_root.items():
            module = root.module()
            top = self._table.get(module) if module is not None else None
            if top is not None:
                parts = [(top, []), *modules.items()]
                self._events.write(
                    root, Phase.ACCUMULATED, step, end.ordinal, parts, record, end.time_ns
                )
