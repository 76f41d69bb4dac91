"""Gradients of activations: one tensor hook per tensor, however many slots that tensor
stands in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rankscope.agent.guard import Guard

__all__ = ["GradientHooks", "GradientTarget"]


@dataclass(frozen=True, slots=True)
class GradientTarget:
    """Where a gradient belongs: the forward call and the slot in it."""

    sequence: int
    slot: str


@dataclass(eq=False, slots=True)
class _Watched:
    tensor: weakref.ReferenceType[torch.Tensor]
    version: int
    """An in-place operation makes the same object another tensor to autograd."""
    targets: list[GradientTarget]
    is_view: bool
    """An in-place operation on a view gives it another place in the graph: the old one is gone."""
    firings: int = 0
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)


class GradientHooks:
    """Registers tensor hooks for one traced step; every hook returns None, so no gradient
    changes.
    """

    def __init__(
        self, guard: Guard, record: Callable[[list[GradientTarget], torch.Tensor, int], None]
    ) -> None:
        self._guard = guard
        self._record = record
        self._watched: dict[int, _Watched] = {}
        self._rewritten: list[_Watched] = []
        """Tensors written in place, and called with again, since they were watched."""
        self.has_fired = False
        """A backward pass of this step reached a tensor."""

    def watch(self, tensor: torch.Tensor, sequence: int, slot: str) -> None:
        """Record the total gradient of `tensor` under a call's slot when backward reaches it."""
        watched = self._watched.get(id(tensor))
        if (
            watched is not None
            and watched.tensor() is tensor
            and watched.version == tensor._version
        ):
            watched.targets.append(GradientTarget(sequence, slot))
            return
        if watched is not None and watched.tensor() is tensor:
            self._rewritten.append(watched)
        target = GradientTarget(sequence, slot)
        watched = _Watched(weakref.ref(tensor), tensor._version, [target], tensor._is_view())
        self._watched[id(tensor)] = watched
        record = self._record

        def fired(gradient: torch.Tensor, watched: _Watched = watched) -> None:
            ordinal = watched.firings  # double backward and retain_graph fire again
            watched.firings += 1
            self.has_fired = True
            record(watched.targets, gradient, ordinal)

        handle = tensor.register_hook(self._guard.hook(fired))  # type: ignore[no-untyped-call]  # torch
        if tensor.grad_fn is None:  # a leaf outlives the graph: its hook must be taken off again
            watched.handles.append(handle)

    def unseen(self) -> list[GradientTarget]:
        """Return where a gradient was due that no hook can have seen: backward ran, and the tensor
        is a view that was written in place.
        """
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
        """Take the hooks off leaf tensors and forget the step; hooks on others go with
        their graph.
        """
        for watched in (*self._watched.values(), *self._rewritten):
            for handle in watched.handles:
                handle.remove()
        self._watched.clear()
        self._rewritten.clear()
        self.has_fired = False


def _is_rewritten(watched: _Watched) -> bool:
    tensor = watched.tensor()
    return tensor is not None and tensor._version != watched.version
