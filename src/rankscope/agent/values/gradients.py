"""Gradients of activations, by one hook a tensor. The same hooks tell where a backward pass begins,
and torch's own queue of functions for the end of a pass where it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rankscope.agent.guard import Guard
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.invisible import invisible
from rankscope.capture.torch_internals.autograd import (
    call_at_end_of_backward,
    current_graph_task,
    has_hook,
)
from rankscope.record.phases import Phase


class GradientTarget(NamedTuple):
    """Where a gradient belongs: the forward call and the slot in it."""

    sequence: int
    path: str
    slot: str


MOST_FIRINGS = 1 << 16
"""So many backward passes of one graph a record can number."""


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
    """Of a leaf, which outlives the graph: its hook must be taken off again."""

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True where this was made for that very tensor, not for one at its address before."""
        if self.tensor is not None:
            return self.tensor() is tensor
        return self.handle is not None and has_hook(tensor, self.handle)


_TIMES_BEHIND = 3
"""Times we queue up again at the end of a pass: DDP and FSDP end their reductions in functions of
the same queue, and some of those queue another one."""


class GradientHooks:
    """Registers tensor hooks for one traced step; none changes a gradient. They notice the
    outermost backward passes too: a pass inside of another (reentrant checkpointing) leaves no
    gradient that is final."""

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
        """Those that run, by torch's number of the graph task."""
        self._has_begun = False
        self._watched: dict[int, _Watched] = {}
        self._rewritten: list[_Watched] = []
        """Tensors written in place, and called with again, since they were watched."""
        self.has_fired = False

    def watch(
        self, tensor: torch.Tensor, target: GradientTarget, *, is_of_root: bool = False
    ) -> None:
        """Record the total gradient of `tensor` when backward reaches it."""
        if is_of_root and self._passes and current_graph_task() == -1:
            self._passes.clear()  # an exception ended them: nobody is told of their end
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
            self._reached(watched.is_of_root)
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

        handle = tensor.register_hook(self._guard.hook(fired))  # type: ignore[no-untyped-call]  # torch
        if is_leaf:
            watched.handle = handle

    def _reached(self, is_of_root: bool) -> None:
        task = current_graph_task()
        if task == -1 or task in self._passes:
            return
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
