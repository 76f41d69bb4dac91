"""Module calls as they nest, which call made which nodes of the autograd graph (what backward
issues at a node belongs to the call that made it), and the values and gradients of a call.
"""

from __future__ import annotations

import bisect
import threading
from _thread import get_ident
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from rankscope.agent.guard import Guard
from rankscope.agent.hooks.modules import ModuleInfo, Root
from rankscope.agent.pythonstack import keyword_arguments
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.gradients import GradientHooks, GradientTarget
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.pytree import call_form, plain_text_of, result_form
from rankscope.capture.torch_internals.autograd import next_node
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.settings import Settings


@dataclass(eq=False, slots=True)
class Scope:
    """One root forward: what all calls inside it have in common."""

    root: Root | None
    """None for a module that was called outside every root (a loss)."""
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
    """Number of this call's record, or of the enclosing call's if this call has no record."""
    is_recorded: bool
    ordinal: int = 0
    first_node: int = 0
    seen_inputs: dict[str, int] | None = None
    """Slot -> id of the tensor read before forward, where a module's own hooks may replace it."""
    skips_output: bool = False
    outputs: tuple[torch.Tensor, ...] = ()
    """What `forward` returned, held until the module's own hooks have run."""


class EventPlace(NamedTuple):
    """Place in a step of an event that is no module call."""

    module: int
    """Definition of the module that was called."""
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
        self.last_ended: OpenCall | None = None
        """The call whose global forward hook ran last; its own hooks may still be running."""

    def pop(self, module: nn.Module) -> list[OpenCall]:
        """Take the call of `module` off the stack, and those above it that no hook saw end."""
        # from the innermost: a module that calls itself is open several times, and its last call
        # ends first
        for index in range(len(self.frames) - 1, -1, -1):
            if self.frames[index].module is module:
                frames = self.frames[index:]
                del self.frames[index:]
                return frames
        return []


class NodeSpan(NamedTuple):
    """The nodes that one call made: `first` to `last`, excluded."""

    first: int
    last: int
    info: ModuleInfo
    scope: Scope
    sequence: int | None
    """Number of the call's record, or of the enclosing call's if the call has no record."""


class NodeMap:
    """The spans of one step's calls. torch numbers the nodes of a graph in the order in which a
    thread makes them, so each module call has a span of numbers, and spans nest as calls do."""

    def __init__(self) -> None:
        self.spans: dict[int, list[NodeSpan]] = {}
        """By thread, in the order in which calls ended: children before their parent."""
        self.latest_spans: dict[ModuleInfo, NodeSpan] = {}

    def begin(self, frame: OpenCall) -> None:
        """Note the begin of a call."""
        frame.first_node = next_node()

    def end(self, frame: OpenCall) -> None:
        """Note the end of a call; a second time after the module's own hooks."""
        last = next_node()
        span = NodeSpan(frame.first_node, last, frame.info, frame.scope, frame.sequence)
        # what a module's own hooks make next is a span of the same call
        frame.first_node = last
        if span.last > span.first:
            self.spans.setdefault(get_ident(), []).append(span)
        self.latest_spans[frame.info] = span

    def find(self, number: int) -> NodeSpan | None:
        """Return the innermost call that made a node; calls of this thread are asked first."""
        # on accelerators backward runs in a thread of its own: numbers of all threads are looked
        # through
        for spans in (self.spans.get(get_ident(), []), *self.spans.values()):
            # spans are sorted by their end: the first that reaches back to the number is the
            # innermost
            start = bisect.bisect_right(spans, number, key=lambda span: span.last)
            innermost = next((span for span in spans[start:] if span.first <= number), None)
            if innermost is not None:
                return innermost
        return None

    def latest(self, info: ModuleInfo) -> NodeSpan | None:
        """Return the call of a module that ended last."""
        return self.latest_spans.get(info)

    def clear(self) -> None:
        """Forget the step."""
        self.spans.clear()
        self.latest_spans.clear()


_UNSEEN = int(ValueFlag.UNSEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """A block's options for calls, beyond the settings."""

    say_leaf: Callable[[object], str] = plain_text_of
    """Text of an argument that is no tensor; by default none whose text needs the program's
    code."""
    is_output_wanted: Callable[[nn.Module, bool], bool] = lambda _module, _is_root: True
    """Takes a module about to be called, and whether it is a root; False where nobody asks for its
    output. A module whose own hooks may replace the output has it read all the same."""
    is_forward_wanted: Callable[[nn.Module], bool] = lambda _module: True
    """False for a module whose call outside all others is not to be recorded."""


class CallValues:
    """Reads the values of recorded calls; to be called where `values.is_on` alone."""

    def __init__(
        self,
        guard: Guard,
        recorder: Recorder,
        values: ValueReader,
        settings: Settings,
        options: CallOptions,
    ) -> None:
        self._say_leaf = options.say_leaf
        self._is_output_wanted = options.is_output_wanted
        self.values = values
        self.wants_backward = Phase.BACKWARD.word in settings.phases
        self.gradients = GradientHooks(guard, recorder, values)

    def inputs_at_global_hook(
        self,
        frame: OpenCall,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None,
    ) -> None:
        """Read the inputs of a call as it begins, before the module's own hooks replace any."""
        kwargs = keyword_arguments() if kwargs is None else kwargs
        tensors = self.read_inputs(frame, args, kwargs or {})
        if module._forward_pre_hooks or kwargs is None:
            frame.seen_inputs = {slot: id(tensor) for slot, tensor in tensors}

    def read_inputs(
        self, frame: OpenCall, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[tuple[str, torch.Tensor]]:
        """Read the inputs of a call, and return the tensors among them by slot."""
        assert frame.sequence is not None  # recorded frames have one
        sequence, path, phase = frame.sequence, frame.info.path, frame.phase
        if self.values.keeps:
            child_count = sum(child is not None for child in frame.module._modules.values())
            self.values.note_form(
                lambda: call_form(args, kwargs, child_count, self._say_leaf),
                sequence, path, "form:input", phase,
            )  # fmt: skip
            frame.skips_output = not self._is_output_wanted(frame.module, not path)
        tensors = self.values.read_all("input", args, sequence, path, phase) if args else []
        if kwargs:
            tensors += self.values.read_all("input", kwargs, sequence, path, phase)
        self.watch(frame, tensors, "input", "grad_input")
        return tensors

    def finish(self, frame: OpenCall, args: object, kwargs: object, output: object) -> None:
        """Read the output of a call."""
        self.values.read_pending()
        assert frame.sequence is not None and isinstance(args, tuple) and isinstance(kwargs, dict)
        sequence, path, phase = frame.sequence, frame.info.path, frame.phase
        if frame.seen_inputs is not None:  # the module's own pre-hooks may have replaced some
            for value in (args, kwargs):
                self.values.read_all(
                    "input", value, sequence, path, phase, unchanged=frame.seen_inputs
                )
        if frame.skips_output and not frame.module._forward_hooks:
            return
        tensors = self.values.read_all("output", output, sequence, path, phase)
        if self.values.keeps:
            self.values.note_form(
                lambda: result_form(output, self._say_leaf), sequence, path, "form:output", phase
            )
        self.watch(frame, tensors, "output", "grad_output")
        if frame.module._forward_hooks:  # kept: what they return is told apart by identity
            frame.outputs = tuple(tensor for _, tensor in tensors)

    def returned(self, frame: OpenCall, output: object) -> None:
        """Read the output that the module's own hooks put in place of that of `forward`."""
        assert frame.sequence is not None  # recorded frames have one
        before = frozenset(id(tensor) for tensor in frame.outputs)
        self.values.read_all(
            "returned", output, frame.sequence, frame.info.path, frame.phase, skip=before
        )

    def end_step(self) -> None:
        """Forget the step: hooks on leaves, tensors seen."""
        if self.wants_backward:
            for target in self.gradients.unseen():
                self.values.note(None, target.sequence, target.slot, Phase.BACKWARD, _UNSEEN)
        self.gradients.forget()
        self.values.end_step()

    def watch(
        self,
        frame: OpenCall,
        tensors: list[tuple[str, torch.Tensor]],
        kind: str,
        gradient_kind: str,
    ) -> None:
        """Record the gradients of these tensors, each under a call that ran forward. Calls that
        share a tensor share its hook. So each (call, slot) is watched at most once, under the
        sequence of its forward call: backward mirrors forward in the tree."""
        if not self.wants_backward or frame.sequence is None:
            return
        # Reentrant checkpointing runs a module forward without gradients, where no tensor can have
        # a hook, and again inside backward, where the tensors do need gradients. Such gradients
        # belong to the first call: its sequence is kept in the scope with the slots that are
        # watched, because the module may be run again for several backward passes. Any other
        # recomputation (non-reentrant) makes tensors that no gradient ever reaches.
        sequence, watched = frame.sequence, None
        if frame.scope.without_gradients:
            forward_call = frame.scope.without_gradients.get((frame.info, frame.ordinal))
            if forward_call is not None:
                sequence, watched = forward_call
        if frame.phase is not Phase.FORWARD and watched is None:
            return
        is_of_root = not frame.info.path and frame.info.root is not None
        with invisible():  # what needs a gradient is not asked in sight of a subclass either
            for slot, tensor in tensors:
                gradient_slot = gradient_kind + slot.removeprefix(kind)
                if not tensor.requires_grad or not self.values.wants(gradient_slot):
                    continue
                if isinstance(tensor, nn.Parameter):  # a hook would stay on the model
                    continue
                if watched is None or gradient_slot not in watched:
                    self.gradients.watch(
                        tensor,
                        GradientTarget(sequence, frame.info.path, gradient_slot),
                        is_of_root=is_of_root and kind == "output",
                    )
                if watched is not None:
                    watched.add(gradient_slot)
