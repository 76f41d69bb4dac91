"""What a module call is handed and hands out, and the gradients that backward brings to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from rankscope.agent.guard import Guard
from rankscope.agent.hooks.callstack import OpenCall
from rankscope.agent.hooks.pythonstack import keyword_arguments
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.gradients import GradientHooks, GradientTarget
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.forms import call_form, plain_text_of, result_form
from rankscope.capture.invisible import invisible
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.settings import Settings

_UNSEEN = int(ValueFlag.UNSEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a block asks of calls beyond what settings can say."""

    say_leaf: Callable[[object], str] = plain_text_of
    """Text of an argument that is no tensor; by default none for which the program runs code."""
    is_output_wanted: Callable[[nn.Module, bool], bool] = lambda _module, _is_root: True
    """Of a module about to be called, and whether it is a root: False where nobody asks what it
    hands out. Where hooks of its own may replace that, it is read all the same."""
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
        self._wants_backward = Phase.BACKWARD.word in settings.phases
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
        seen = self.read_inputs(frame, args, kwargs or {})
        if module._forward_pre_hooks or kwargs is None:
            frame.seen_inputs = {slot: id(tensor) for slot, tensor in seen}

    def read_inputs(
        self, frame: OpenCall, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[tuple[str, torch.Tensor]]:
        """Read the inputs of a call, and return the tensors among them by slot."""
        assert frame.sequence is not None  # recorded frames have one
        sequence, path, phase = frame.sequence, frame.info.path, frame.phase
        if self.values.keeps:
            held = sum(child is not None for child in frame.module._modules.values())
            self.values.note_form(
                lambda: call_form(args, kwargs, held, self._say_leaf),
                sequence, path, "form:input", phase,
            )  # fmt: skip
            frame.skips_output = not self._is_output_wanted(frame.module, not path)
        seen = self.values.read_all("input", args, sequence, path, phase) if args else []
        if kwargs:
            seen += self.values.read_all("input", kwargs, sequence, path, phase)
        self._watch(frame, seen, "input", "grad_input")
        return seen

    def finish(self, frame: OpenCall, args: object, kwargs: object, output: object) -> None:
        """Read what a call hands out."""
        self.values.read_pending()
        assert frame.sequence is not None and isinstance(args, tuple) and isinstance(kwargs, dict)
        sequence, path, phase = frame.sequence, frame.info.path, frame.phase
        if frame.seen_inputs is not None:  # the module's own pre-hooks may have replaced some
            for value in (args, kwargs):
                self.values.read_all("input", value, sequence, path, phase, seen=frame.seen_inputs)
        if frame.skips_output and not frame.module._forward_hooks:
            return
        tensors = self.values.read_all("output", output, sequence, path, phase)
        if self.values.keeps:
            self.values.note_form(
                lambda: result_form(output, self._say_leaf), sequence, path, "form:output", phase
            )
        self._watch(frame, tensors, "output", "grad_output")
        if frame.module._forward_hooks:  # kept: what they return is told apart by identity
            frame.outputs = tuple(tensor for _, tensor in tensors)

    def returned(self, frame: OpenCall, output: object) -> None:
        """Read what the module's own hooks put in place of what `forward` returned."""
        assert frame.sequence is not None  # recorded frames have one
        before = frozenset(id(tensor) for tensor in frame.outputs)
        self.values.read_all(
            "returned", output, frame.sequence, frame.info.path, frame.phase, skip=before
        )

    def end_step(self) -> None:
        """Forget the step: hooks on leaves, tensors seen."""
        if self._wants_backward:
            for target in self.gradients.unseen():
                self.values.note(None, target.sequence, target.slot, Phase.BACKWARD, _UNSEEN)
        self.gradients.forget()
        self.values.end_step()

    def _watch(
        self,
        frame: OpenCall,
        tensors: list[tuple[str, torch.Tensor]],
        kind: str,
        gradient_kind: str,
    ) -> None:
        """Have the gradients of these tensors recorded, each under a call that ran forward. Calls
        that share a tensor share its hook. So each (call, slot) is watched at most once, under the
        sequence of its forward call: backward mirrors forward in the tree."""
        if not self._wants_backward or frame.sequence is None:
            return
        # Reentrant checkpointing runs a module forward without gradients, where no tensor can have
        # a hook, and again inside backward, where the tensors do need gradients. Such gradients
        # belong to the first call: its sequence is kept in the scope with the slots that are
        # watched, because the module may be run again for several backward passes. Any other
        # recomputation (non-reentrant) makes tensors that no gradient ever reaches.
        sequence, watched = frame.sequence, None
        if frame.scope.without_gradients:
            found = frame.scope.without_gradients.get((frame.info, frame.ordinal))
            if found is not None:
                sequence, watched = found
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
