"""What an optimizer step does to the roots: gradients just before it, parameters just after it.

Each optimizer records its own parameters. Parameters that no optimizer holds have their gradients
recorded, and marked, before a step outside a backward pass. Somebody else trains them behind that
step (from flat copies, a group at a time): they are read once, when the train step closes; frozen
ones with the first optimizer that holds others. A step without an optimizer is read when it closes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rankscope.agent.hooks.modules import ModuleTable, Root
from rankscope.agent.steps.optimizers import (
    Holdings,
    OptimizerSearch,
    is_skipped_inside,
    scaling_of,
)
from rankscope.agent.values.gradients import AccumulatedGradients, GradientHooks
from rankscope.agent.values.rootevents import RootEvents, has_gradient
from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.call import Mode
from rankscope.record.notes import Note, NoteKind, modules_text, options_text
from rankscope.record.value import ValueFlag
from rankscope.spool.recordformat import StepEvent

_SKIPPED, _SCALED = int(ValueFlag.SKIPPED), int(ValueFlag.SCALED)
_MOST_OPTIONS = 2_000
_AFTER_CALL = int(ValueFlag.AFTER_CALL)
_SHAPES_NAMED = 3
_LONGEST_VALUE = 40
_NO_OPTIONS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
)


class Updates:
    """Records the optimizer steps of traced train steps."""

    def __init__(
        self, events: RootEvents, optimizers: OptimizerSearch, gradients: GradientHooks
    ) -> None:
        self._events = events
        self._optimizers = optimizers
        self._activation_gradients = gradients
        self.accumulated = AccumulatedGradients(events)
        gradients.begins = self._backward_begins
        gradients.pass_begins = self.accumulated.pass_begins
        gradients.pass_ends = self.accumulated.pass_ends
        self.training_threads: set[int] = set()
        self._count = 0
        """Optimizer steps of this step so far, skipped and failed ones included."""
        self._running_class = ""
        """Class of the optimizer whose step (without a closure) has begun and not ended."""
        self._noted: set[Note] = set()
        self._described: set[Root] = set()
        """Roots whose modes were noted in this step."""
        self._options: set[Note] = set()
        self._flags = 0
        self._carried: frozenset[int] = frozenset()
        """Parameters that had a gradient before the first backward of the step."""
        self._read: set[int] = set()
        self._unheld: set[int] = set()
        """Parameters that no optimizer held at an optimizer step of this step."""
        self._unheld_read: set[int] = set()
        """Unheld parameters for which this step has recorded whether they have a gradient."""
        self._shown = 0
        """One more than the ordinal of the last parameters recorded in this step."""

    def _backward_begins(self) -> None:
        """Look which gradients the step before has left: called once in a step."""
        if not self.are_threads_training:
            self._carried = self._events.with_gradient(self._optimizers.parameters())

    @property
    def are_threads_training(self) -> bool:
        """True if several threads have trained: any gradient may then be written by another one,
        unless an optimizer steps with it."""
        return len(self.training_threads) > 1

    def begins(self, optimizer: torch.optim.Optimizer, step: int, *, has_closure: bool) -> None:
        """Record gradients before an outermost optimizer step; with a closure they come later."""
        self._note_raised(step)
        if has_closure:
            self.accumulated.forget()
        else:
            self._running_class = type(optimizer).__name__
            self._count += 1
            self._gradients(optimizer, step)

    def ends(self, optimizer: torch.optim.Optimizer, step: int, *, has_closure: bool) -> None:
        """Record parameters after an outermost optimizer step."""
        self._running_class = ""
        if has_closure:
            self._count += 1
            self._gradients(optimizer, step)
        ordinal = max(self._count - 1, 0)
        holdings = self._holdings(optimizer)
        concerned = holdings.owned
        self._unheld |= holdings.unheld
        if concerned:
            # parameters nobody holds and that need a gradient are trained elsewhere, behind this
            # step
            needing = self._events.parameters_where(holdings.unheld, lambda p: p.requires_grad)
            frozen = holdings.unheld - needing
            concerned |= frozen - self._read
            self._read |= concerned
            self._shown = ordinal + 1
            self._events.parameters(step, ordinal, concerned, flags=self._flags & _SKIPPED)

    def skipped(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Record the gradients for which a GradScaler did not step an optimizer."""
        self._note(step, Note.of(NoteKind.SCALER_SKIPPED, optimizer=type(optimizer).__name__))
        self._count += 1
        self._gradients(optimizer, step, flags=_SKIPPED)

    def close_step(self, step: int) -> None:
        """Forget a step; record its effect on parameters if no optimizer has stepped."""
        self._note_raised(step)
        if not self._count and not self._optimizers.exists():
            has_gradients = self._events.has_gradients()
            if has_gradients:
                self._events.gradients(step, 0, None, flags=_AFTER_CALL)
            if has_gradients or self._activation_gradients.has_fired:
                self._events.parameters(step, 0, None, flags=_AFTER_CALL)
        if unread := frozenset(self._unheld - self._read):
            self._events.parameters(step, self._shown, unread, flags=_AFTER_CALL)
        self.accumulated.forget()
        self._count = self._shown = 0
        self._carried = frozenset()
        self._read.clear()
        self._unheld.clear()
        self._unheld_read.clear()
        self._noted.clear()
        self._described.clear()
        self._events.end_step()

    def _gradients(self, optimizer: torch.optim.Optimizer, step: int, flags: int = 0) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            flags |= _SCALED
        if is_skipped_inside(optimizer):
            flags |= _SKIPPED
            self._note(
                step, Note.of(NoteKind.OPTIMIZER_SKIPPED, optimizer=type(optimizer).__name__)
            )
        self._flags = flags
        holdings = self._holdings(optimizer)
        self._note(step, _describe_strangers(optimizer, holdings))
        self._note_options(optimizer, step)
        self._note(step, _describe_rates(optimizer))
        # once a step: with an optimizer for each parameter a walk at each would be quadratic
        for root in self._events.table.roots:
            if root.calls_in_step and root not in self._described:
                self._described.add(root)
                self._note(step, _describe_modes(root, self._events.table))
        reread = holdings.unheld & self._unheld_read
        again_with = self._events.parameters_where(reread, has_gradient)
        concerned = holdings.owned | (holdings.unheld - reread) | again_with
        self._unheld_read |= holdings.unheld
        as_left = self._events.gradients(
            step, self._count - 1, concerned, flags=flags, unheld=holdings.unheld,
            carried=self._carried, unsynced=self.accumulated.unsynced,
            left=self.accumulated.left_gradients(),
            extras=scaling_of(optimizer),
        )  # fmt: skip
        self.accumulated.write_untaken(step, as_left)

    def _holdings(self, optimizer: torch.optim.Optimizer) -> Holdings:
        parameters = frozenset(map(id, self._events.table.parameters()))
        holdings = self._optimizers.holdings(optimizer, parameters)
        if current_graph_task() != -1:  # inside backward: gradients of others are not final
            return replace(holdings, unheld=frozenset())
        return holdings

    def _note_raised(self, step: int) -> None:
        # torch calls no post-hook of a step that raised: it is missed at the next event
        if self._running_class:
            self._note(step, Note.of(NoteKind.OPTIMIZER_RAISED, optimizer=self._running_class))
            self._running_class = ""

    def _note_options(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        note = _describe_options(optimizer)
        if note is not None and (note in self._options or len(self._options) < _MOST_OPTIONS):
            self._options.add(note)
            self._note(step, note)

    def _note(self, step: int, note: Note | None) -> None:
        if note is not None and note not in self._noted:
            self._noted.add(note)
            self._events.recorder.step(StepEvent.NOTE, Mode.TRAIN, step, note)


# ---- what is noted of an optimizer when it steps -------------------------------------------------


def _describe_strangers(optimizer: torch.optim.Optimizer, holdings: Holdings) -> Note | None:
    """Name the parameters of an optimizer that no known module owns. An optimizer made before
    `fully_shard` or `parallelize_module` holds the replaced parameters, which get no gradient; one
    with master copies gives them gradients itself."""
    strangers = holdings.strangers
    if not strangers:
        return None
    with invisible():
        without = sum(tensor.grad is None for tensor in strangers)
        shapes = sorted({str(list(tensor.shape)) for tensor in strangers})
    named = ", ".join(shapes[:_SHAPES_NAMED]) + (", ..." if len(shapes) > _SHAPES_NAMED else "")
    return Note.of(
        NoteKind.FOREIGN_PARAMETERS,
        optimizer=type(optimizer).__name__,
        own=len(holdings.owned),
        foreign=len(strangers),
        idle=without,
        shapes=named,
    )


def _describe_rates(optimizer: torch.optim.Optimizer) -> Note | None:
    """Count the parameters with a gradient that a step leaves unchanged because of a learning rate
    of 0. A rate that is a tensor is not read: it may be on an accelerator."""
    with invisible():
        still = sum(
            parameter.grad is not None
            for group in getattr(optimizer, "param_groups", ())
            if isinstance(group.get("lr"), int | float) and not group["lr"]
            for parameter in group["params"]
        )
    name = type(optimizer).__name__
    return Note.of(NoteKind.RATE_OF_ZERO, optimizer=name, parameters=still) if still else None


def _describe_modes(root: Root, table: ModuleTable) -> Note | None:
    """Name the outermost modules of a root that are in eval mode while an optimizer steps; a
    measurement in eval mode between two steps is over by then."""
    in_training = {info.path: bool(module.training) for info, module in table.of_root(root)}
    in_part: set[str] = set()
    """Paths of modules in training, and of all around them: these are not in eval mode as a
    whole."""
    for path, is_training in in_training.items():
        while is_training and path not in in_part:
            in_part.add(path)
            path = path.rpartition(".")[0]
    whole = [path for path in in_training if path not in in_part]
    outermost = [path for path in whole if not path or path.rpartition(".")[0] in in_part]
    modules = modules_text(outermost)
    return (
        Note.of(NoteKind.IN_EVAL_MODE, model=root.class_name, modules=modules) if modules else None
    )


def _describe_options(optimizer: torch.optim.Optimizer) -> Note | None:
    """Return an optimizer's options: values that differ between groups in the order of the groups,
    `0.1 | 0.0`; none that only choose an implementation (`foreach`)."""
    values_by_name: dict[str, list[str]] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for name, value in group.items():
            values = values_by_name.setdefault(str(name), [])
            text = _option(value)
            if name not in _NO_OPTIONS and text not in values:
                values.append(text)
    options = options_text(values_by_name)
    name = type(optimizer).__name__
    return Note.of(NoteKind.OPTIMIZER_OPTIONS, optimizer=name, options=options) if options else None


def _option(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "(a tensor)"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_option, value))})"
    if value is None or isinstance(value, (bool, int, str)):
        return str(value)[:_LONGEST_VALUE]
    return f"{value:.9g}" if isinstance(value, float) else ""
