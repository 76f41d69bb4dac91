"""How a step is noticed: by a root forward, an optimizer's step, or, of a model that was compiled
whole, by the optimizer alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rankscope.agent.guard import Guard, say
from rankscope.agent.hooks.members import parameters_of_module
from rankscope.agent.hooks.modules import Root
from rankscope.agent.steps.compiled import HIDDEN, outermost_modules_of
from rankscope.agent.steps.optimizers import runs_closure, steps_running
from rankscope.agent.steps.stepping import Stepping
from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.record.call import Mode
from rankscope.record.streams import EndReason
from rankscope.settings import Settings
from rankscope.spool.cells import StepEvent

__all__ = ["StepBoundaries"]


class StepBoundaries:
    """The hooks that stand in every step, traced or not."""

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        preferred_root: nn.Module | None,
        is_open: Callable[[], bool],
        open_session: Callable[[], bool],
        close_session: Callable[[EndReason], None],
    ) -> None:
        """Watch for the first step.

        Args:
            settings: what to trace.
            guard: keeps what fails here out of the program.
            preferred_root: the module whose path is to be "".
            is_open: True once the spool is open.
            open_session: opens it; False where this process is not traced.
            close_session: ends the session.
        """
        self.preferred = [] if preferred_root is None else [preferred_root]
        """Modules to be roots, until the session is open."""
        self._is_open = is_open
        self._open_session = open_session
        self._expected: Root | None = None
        """Root whose wrapper has just been counted by `_watch`."""
        self.steps = Stepping(settings, guard, self._watch, open_session, close_session)
        self.steps.hooks.watch_optimizers(self._optimizer_begins, self._optimizer_ends)
        self.steps.hooks.watch_for_step()

    def _watch(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None = None,
    ) -> None:
        """The one hook of an untraced step: is this the next root forward?"""
        steps = self.steps
        if current_graph_task() != -1:
            return
        info = steps.parts.table.get(module) if self._is_open() else None
        is_chosen = any(module is each for each in self.preferred)
        if info is None and not is_chosen and next(parameters_of_module(module), None) is None:
            return
        if not self._open_session():
            return
        if info is not None and (info.root is None or (info.path and not steps.clock.is_ended)):
            return
        if steps.is_train_over and info is not None and steps.is_train_forward(info, module):
            steps.hooks.stop_watching()  # until the next optimizer step
            return
        expected, self._expected = self._expected, None
        if info is not None and info.root is expected and not info.is_wrapper:
            return  # the wrapper around it has just been counted
        steps.parts.tracer.before_forward(module, args, kwargs)
        info = steps.parts.table.get(module)
        if info is not None and info.is_wrapper:
            self._expected = info.root

    def _optimizer_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        steps = self.steps
        if steps.is_train_over:
            return
        steps.optimizers.saw(optimizer)
        steps.scalers.stepped()
        steps.clock.set_optimizer_depth(steps_running() - 1)
        if not steps.clock.optimizer_begins():
            return
        has_closure = runs_closure(args, kwargs)
        if not has_closure:  # which may run the forward inside the step
            self._begin_hidden_step(optimizer)
        if steps.traced_train is not None:
            steps.parts.updates.begins(optimizer, steps.traced_train, has_closure=has_closure)

    def _optimizer_ends(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        steps = self.steps
        if steps.is_train_over:
            steps.hooks.watch_for_step()
            return
        has_closure = runs_closure(args, kwargs)
        if has_closure:
            self._begin_hidden_step(optimizer)
        was_ended = steps.clock.is_ended
        if not steps.clock.optimizer_ends():
            return
        if steps.traced_train is not None:
            steps.parts.updates.ends(optimizer, steps.traced_train, has_closure=has_closure)
        else:
            steps.hooks.watch_for_step()
        is_next = steps.chosen.expects(steps.clock.train + 1)
        # now, because the next forward of a model compiled in place is only seen if it runs eagerly
        steps.stance.choose(is_eager=is_next)
        if is_next:
            steps.collectives.expect_step(is_first=False)
        if not was_ended and current_graph_task() == -1:  # in backward each rank is elsewhere
            steps.collectives.count_messages_from(f"train {steps.clock.train + 1}")

    def _begin_hidden_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the train step that an optimizer ends although no hook saw its forward."""
        steps = self.steps
        is_first = steps.clock.train < 0
        if not steps.hidden.begins(optimizer, is_first=is_first):
            return
        if not (is_first or steps.clock.is_ended):
            return
        if is_first:
            modules = outermost_modules_of(optimizer)
            if not modules or not self._open_session():
                return
            for module in modules:
                info = steps.parts.tracer.learn(module)
                if info.root is not None:
                    info.root.is_hidden = True
                    steps.record_setup(info)
            if steps.parts.rank == 0:
                say(f"{type(modules[0]).__name__}: {HIDDEN}")
        step = steps.clock.root_forward(has_gradients=True, optimizer_exists=lambda: True).step
        steps.end_eval()
        steps.end_train()
        # hooks stay as they are: each change of theirs would compile the model again
        if steps.chosen.begins(Mode.TRAIN, step):
            steps.traced_train = step
            steps.parts.recorder.step(StepEvent.BEGIN, Mode.TRAIN, step)
            for info in steps.parts.table.hidden_roots():
                steps.parts.tracer.note_hidden_root(info, step)
