"""Module calls as they nest, and which call made which nodes of the autograd graph: what backward
issues at a node belongs to the call that made it."""

from __future__ import annotations

import bisect
import threading
from _thread import get_ident
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from rankscope.agent.hooks.modules import ModuleInfo, Root
from rankscope.capture.torch_internals.autograd import next_node
from rankscope.record.call import Mode
from rankscope.record.phases import Phase


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
    without_gradients: dict[tuple[ModuleInfo, int], tuple[int, set[str]]] = field(
        default_factory=dict
    )
    """(module, ordinal) of forward calls without gradients -> sequence, and the slots whose
    gradients are watched: reentrant checkpointing shows the others when it runs them again."""
    recompute_calls: dict[ModuleInfo, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class OpenCall:
    """One module call that has begun and not yet ended."""

    module: nn.Module
    info: ModuleInfo
    scope: Scope
    phase: Phase
    sequence: int | None
    """Number of this call's record, or of the enclosing call's where this one leaves none."""
    is_recorded: bool
    ordinal: int = 0
    first_node: int = 0
    seen_inputs: dict[str, int] | None = None
    """Slot -> id of the tensor read before forward, where a module's own hooks may replace it."""
    skips_output: bool = False
    outputs: tuple[torch.Tensor, ...] = ()
    """What `forward` returned, held until the module's own hooks have run."""


class EventPlace(NamedTuple):
    """Where in a step something happens that is no module call."""

    module: int
    """Definition of the module it belongs to."""
    root: int
    parent: int | None
    mode: Mode
    step: int
    micro_batch: int | None
    issuer: str
    is_selected: bool
    path: str


class CallStacks(threading.local):
    """The calls open on this thread, and the one that ended last."""

    def __init__(self) -> None:
        self.frames: list[OpenCall] = []
        self.ended: OpenCall | None = None
        """The call whose global forward hook ran last; its own hooks may still be running."""

    def pop(self, module: nn.Module) -> list[OpenCall]:
        """Take the call of `module` off the stack, and those above it that no hook saw end."""
        for index in range(len(self.frames) - 1, -1, -1):
            if self.frames[index].module is module:
                taken = self.frames[index:]
                del self.frames[index:]
                return taken
        return []


class NodeSpan(NamedTuple):
    """The nodes that one call made: `first` to `last`, excluded."""

    first: int
    last: int
    info: ModuleInfo
    scope: Scope
    sequence: int | None
    """Of the call, or of the one around it where it left no record."""


class NodeMap:
    """The spans of one step's calls. torch numbers the nodes of a graph in the order in which a
    thread makes them, so the nodes of one module call are a span of numbers, and calls nest as
    spans do."""

    def __init__(self) -> None:
        self._spans: dict[int, list[NodeSpan]] = {}
        """By thread, in the order in which calls ended: children before their parent."""
        self._latest: dict[ModuleInfo, NodeSpan] = {}

    def begin(self, frame: OpenCall) -> None:
        """Note where a call begins."""
        frame.first_node = next_node()

    def end(self, frame: OpenCall) -> None:
        """Note where it ends; called again, where what follows it (its own hooks) ends."""
        last = next_node()
        span = NodeSpan(frame.first_node, last, frame.info, frame.scope, frame.sequence)
        frame.first_node = last
        if span.last > span.first:
            self._spans.setdefault(get_ident(), []).append(span)
        self._latest[frame.info] = span

    def find(self, number: int) -> NodeSpan | None:
        """Return the innermost call that made a node; calls of this thread are asked first."""
        for spans in (self._spans.get(get_ident(), []), *self._spans.values()):
            start = bisect.bisect_right(spans, number, key=lambda span: span.last)
            innermost = next((span for span in spans[start:] if span.first <= number), None)
            if innermost is not None:
                return innermost
        return None

    def latest(self, info: ModuleInfo) -> NodeSpan | None:
        """Return the call of a module that ended last."""
        return self._latest.get(info)

    def clear(self) -> None:
        """Forget the step."""
        self._spans.clear()
        self._latest.clear()
