"""Module calls as they nest: scopes, frames, and the stack of each thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from rankscope.agent.hooks.modules import ModuleInfo, Root
from rankscope.record.call import Mode
from rankscope.record.phases import Phase

__all__ = ["CallStacks", "EventPlace", "OpenCall", "Scope"]


@dataclass(eq=False, slots=True)
class Scope:
    """One root forward: what all calls inside it have in common."""

    root: Root | None
    """None for a module called outside every root (a loss)."""
    mode: Mode
    step: int
    micro_batch: int | None
    is_muted: bool
    """True where this step is not traced although hooks are on for another."""
    forward_calls: dict[ModuleInfo, int] = field(default_factory=dict)
    """How often each module ran forward in this scope."""
    without_gradients: dict[tuple[ModuleInfo, int], tuple[int, set[str]]] = field(
        default_factory=dict
    )
    """(module, ordinal) of the forward calls that ran with gradients off -> sequence, and the slots
    whose gradients are watched: reentrant checkpointing shows the others when it runs them again.
    """
    recompute_calls: dict[ModuleInfo, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class OpenCall:
    """One module call that has begun and not yet ended."""

    module: nn.Module
    info: ModuleInfo
    scope: Scope
    phase: Phase
    sequence: int | None
    """Number of this call's record; of the enclosing call's where this one leaves none; None for
    none.
    """
    is_recorded: bool
    ordinal: int = 0
    first_node: int = 0
    """Number that the first node of its autograd graph has, if it has any."""
    seen_inputs: dict[str, int] | None = None
    """Slot -> id of the tensor read before forward, kept where a module's own hooks may
    replace it.
    """
    skips_output: bool = False
    """Nobody asks what `forward` hands out."""
    outputs: tuple[torch.Tensor, ...] = ()
    """What `forward` returned, held until the module's own hooks have run."""


class EventPlace(NamedTuple):
    """Where in a step something happens that is no module call."""

    module: int
    """Definition of the module it belongs to."""
    root: int
    """Definition of that module's root, 0 for none."""
    parent: int | None
    """The call it is inside of."""
    mode: Mode
    step: int
    micro_batch: int | None
    issuer: str
    """One of `record.collective.ISSUERS`."""
    is_selected: bool
    """The setting `paths` takes that module."""
    path: str
    """Of that module."""


class CallStacks(threading.local):
    """The calls open on this thread, and the one that ended last."""

    def __init__(self) -> None:
        self.frames: list[OpenCall] = []
        self.ended: OpenCall | None = None
        """The call whose global forward hook ran last; its own hooks may still be running."""

    def pop(self, module: nn.Module) -> list[OpenCall]:
        """Take the call of `module` off the stack, and those above it that no hook saw end
        (KeyboardInterrupt, or an exception past a hook); nothing where it was never seen to begin.
        """
        for index in range(len(self.frames) - 1, -1, -1):
            if self.frames[index].module is module:
                taken = self.frames[index:]
                del self.frames[index:]
                return taken
        return []
