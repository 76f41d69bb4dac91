"""The steps of a session: which one runs, whether it is traced, and what is on while it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from rankscope.agent.collectives.stepcollectives import CollectiveTracing, RunningStep
from rankscope.agent.guard import Guard, say
from rankscope.agent.hooks.callstack import Scope
from rankscope.agent.hooks.install import HookSet
from rankscope.agent.hooks.members import parameters_of_module
from rankscope.agent.hooks.modules import ModuleInfo, Root
from rankscope.agent.hooks.pythonstack import explain_no_room, has_room_for, is_inferring_shapes
from rankscope.agent.parts import Opened, SessionParts
from rankscope.agent.steps.chosen import ChosenSteps
from rankscope.agent.steps.compiled import EagerStance, HiddenSteps
from rankscope.agent.steps.optimizers import OptimizerSearch, steps_running
from rankscope.agent.steps.scalers import ScalerWatch
from rankscope.agent.steps.schedules import ScheduleWatch
from rankscope.agent.steps.stepclock import StepClock, Tick
from rankscope.capture.groups import process_groups
from rankscope.capture.invisible import invisible
from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.parallel import stage_modules
from rankscope.record.call import Mode
from rankscope.record.streams import EndReason
from rankscope.settings import Settings
from rankscope.spool.cells import StepEvent

__all__ = ["Stepping"]


class Stepping:
    """Begins and ends steps, and turns tracing on and off with them."""

    parts: SessionParts
    """Set by `open`: a step begins only where the spool is open."""

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        watch: Callable[..., None],
        open_session: Callable[[], bool],
        close_session: Callable[[EndReason], None],
    ) -> None:
        """Expect the first step; nothing is on but what notices it.

        Args:
            settings: what to trace.
            guard: keeps what fails here out of the program.
            watch: the hook of an untraced step.
            open_session: opens the spool; False where this process is not traced.
            close_session: ends the session.
        """
        self._guard = guard
        self._close = close_session
        self.clock = StepClock()
        self.optimizers = OptimizerSearch(guard)
        self.optimizers.put_on()
        self._train_scope: Scope | None = None
        self._eval_scope: Scope | None = None
        self._eval_calls: Counter[Root] = Counter()
        """Forwards of each root in the eval step that runs."""
        self.traced_train: int | None = None
        """Number of the train step being traced."""
        self.chosen = ChosenSteps(settings.steps)
        self.is_train_over = False
        """No later train step can be traced: only evaluation is still watched for."""
        self.hidden = HiddenSteps()
        self.stance = EagerStance(is_wanted=settings.compile == "eager")
        self.stance.choose(is_eager=0 in settings.steps)
        self.scalers = ScalerWatch(guard.hook(self.optimizer_skipped))
        self.schedules = ScheduleWatch(guard.hook(self._run_begins))
        self._mode_of_run = Mode.TRAIN
        """What the run of a pipeline schedule that goes on is going to be."""
        self.collectives = CollectiveTracing(guard, settings, open_session, self._running_step)
        if 0 in settings.steps:
            self.collectives.expect_step(is_first=True)
        self.hooks = HookSet(guard, watch)

    def open(self, parts: SessionParts, opened: Opened) -> None:
        """Take what an open spool gives."""
        self.parts = parts
        self.collectives.open(parts.recorder, parts.values, parts.tracer, parts.table)
        self.chosen.watch_file(parts.recorder, parts.rank, opened.step_trigger_folder)

    def open_scope(self, info: ModuleInfo, module: nn.Module) -> Scope | None:
        """Say which step an outermost call belongs to; turn tracing on or off where a step
        begins.
        """
        root = info.root
        run = self.schedules.current()
        if is_inferring_shapes():  # no part of any step: what it computes is garbage
            step = max(self.clock.train, 0)
            is_seen = self.hooks.is_tracing
            return Scope(root, Mode.TRAIN, step, None, is_muted=True) if is_seen else None
        if root is None:
            return self._loose_scope()
        last = self._train_scope if torch.is_grad_enabled() else self._eval_scope
        if info.path and last is not None and last.root is root and not self.clock.is_ended:
            return last  # a submodule called directly, inside the step its root has begun
        self.record_setup(info)
        if not has_room_for(root.depth):
            self._leave_too_deep(root)
            return None
        if self.clock.is_inside_optimizer:
            self.clock.set_optimizer_depth(steps_running())
        tick = self.clock.root_forward(
            has_gradients=self.is_train_forward(info, module),
            optimizer_exists=self.optimizers.exists,
            run=run,
        )
        if tick.mode is Mode.EVAL:
            return self._eval_forward(tick, root)
        self.hidden.root_was_seen()
        if tick.opened:
            self._begin_train(tick.step)
        if self.traced_train is None:
            return None
        self._train_scope = Scope(root, Mode.TRAIN, tick.step, root.calls_in_step, is_muted=False)
        root.calls_in_step += 1
        return self._train_scope

    def is_train_forward(self, info: ModuleInfo, module: nn.Module) -> bool:
        """True where a root forward builds a graph that reaches a parameter."""
        if info.root is None or not torch.is_grad_enabled():
            return False
        with invisible():
            return info.root.needs_gradient(module)

    def _loose_scope(self) -> Scope:
        """Return the scope of a module called outside every root: the step that is running."""
        scope = self._train_scope if torch.is_grad_enabled() else self._eval_scope
        if scope is not None:
            return scope
        mode, step = (
            (Mode.TRAIN, self.clock.train)
            if torch.is_grad_enabled()
            else (Mode.EVAL, self.clock.eval)
        )
        return Scope(None, mode, max(step, 0), None, is_muted=self.traced_train is None)

    def _leave_too_deep(self, root: Root) -> None:
        """Switch off before a model that nests so deep that hooks would end its own calls."""
        text = explain_no_room(root.class_name, root.depth)
        self.parts.recorder.error(None, text)
        say(text)
        self._close(EndReason.SWITCHED_OFF)

    def _begin_train(self, step: int) -> None:
        """Leave the steps before and begin this one, traced or not."""
        self.end_eval()
        self.end_train()
        if self.chosen.begins(Mode.TRAIN, step):
            self.traced_train = step
            self._turn_on(Mode.TRAIN, step)
        else:
            self._turn_off()
            self.is_train_over = self.chosen.is_over(step)
            if self.is_train_over or self.optimizers.exists():
                self.hooks.stop_watching()

    def end_train(self) -> None:
        """Close the train step, traced or not."""
        for root in self.parts.table.roots:
            root.calls_in_step = 0
        step, self.traced_train, self._train_scope = self.traced_train, None, None
        if self._guard.is_too_deep:
            self._guard.is_too_deep = False
            self.parts.recorder.error(
                None, "Python's recursion limit left a hook no room: calls lack"
            )
        if step is not None:
            self.parts.updates.close_step(
                step, is_trained=self.parts.call_values.gradients.has_fired
            )
            self.collectives.end_step(Mode.TRAIN, step)
            self.parts.recorder.step(StepEvent.END, Mode.TRAIN, step)
            self.parts.tracer.end_step()
            self.parts.table.forget_dead()
            self.define_groups()

    def _eval_forward(self, tick: Tick, root: Root) -> Scope | None:
        """Return the scope of a root forward without gradients, a step of its own but in a run of a
        pipeline schedule; None where that step is not traced.
        """
        if tick.opened:
            self.end_eval()
            is_muted = not self.chosen.begins(Mode.EVAL, tick.step)
            if is_muted and self.traced_train is None:
                self._turn_off()
                return None
            if not is_muted:
                self._turn_on(Mode.EVAL, tick.step)
        elif self._eval_scope is None:
            return None
        else:
            is_muted = self._eval_scope.is_muted
        self._eval_scope = Scope(
            root, Mode.EVAL, tick.step, self._eval_calls[root], is_muted=is_muted
        )
        self._eval_calls[root] += 1
        return self._eval_scope

    def end_eval(self) -> None:
        """Close the eval step; hooks stayed on behind it for the loss that may follow its root."""
        scope, self._eval_scope = self._eval_scope, None
        self._eval_calls.clear()
        if scope is not None and not scope.is_muted:
            self.collectives.end_step(Mode.EVAL, scope.step)
            self.parts.recorder.step(StepEvent.END, Mode.EVAL, scope.step)
            if self.traced_train is None:
                self.parts.tracer.end_step()

    def optimizer_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a GradScaler skipped an optimizer step."""
        if self.traced_train is not None:
            self.parts.updates.skipped(optimizer, self.traced_train)

    def define_groups(self) -> None:
        """Write down the process groups made since the last time; read off torch's tables."""
        for group in process_groups():
            self.parts.recorder.group(group)

    def record_setup(self, info: ModuleInfo) -> None:
        """Write down the modules and parameters of a root before its first step."""
        assert info.root is not None  # only called for modules of a root
        if info.root.is_setup_recorded:
            return
        info.root.is_setup_recorded = True
        self.parts.definitions.write_root(info.root)
        self.parts.parameters.setup(info.root)

    def _turn_on(self, mode: Mode, step: int) -> None:
        self.parts.values.collect()  # of the step before: what accelerators have finished by now
        self.stance.choose(is_eager=True)
        self.parts.recorder.step(StepEvent.BEGIN, mode, step, self.stance.note)
        self.hooks.trace()
        self.scalers.put_on()
        self.collectives.put_on()

    def _turn_off(self) -> None:
        if self.hooks.is_tracing:
            self.hooks.stop_tracing()
        self.stance.choose(is_eager=False)
        self.scalers.take_off()
        if not (self.clock.is_ended and self.chosen.expects(self.clock.train + 1)):
            self.collectives.take_off()
        self.hooks.watch_for_step()

    def follow_own_hooks(self, info: ModuleInfo) -> None:
        """Stand behind the hooks of a root's modules while it runs, and not a moment longer.

        A model that is saved or copied between two forwards must carry nothing of ours.
        """
        if info.root is not None:
            self.hooks.trace_own_hooks_of(self.parts.table.with_hooks(info.root))

    def remove_hooks(self, *, is_inside_hook: bool = False) -> None:
        """Leave torch as it was."""
        self.hooks.remove_all(is_inside_hook=is_inside_hook)
        self.optimizers.take_off()
        self.scalers.take_off()
        self.schedules.take_off()
        self.collectives.take_off()
        self.stance.choose(is_eager=False)

    def _run_begins(self, schedule: object) -> None:
        """Expect a step: a run of a pipeline schedule begins, and its stages may receive first."""
        steps = {
            mode: self.clock.step_of_next_run(mode, self.optimizers.exists)
            for mode in (Mode.TRAIN, Mode.EVAL)
        }
        if any(map(self.chosen.expects, steps.values())):
            modules = stage_modules(schedule)
            needs_gradient = torch.is_grad_enabled() and (
                not modules
                or any(p.requires_grad for each in modules for p in parameters_of_module(each))
            )
            self._mode_of_run = Mode.TRAIN if needs_gradient else Mode.EVAL
            if self.chosen.expects(steps[self._mode_of_run]):
                self.collectives.expect_step(is_first=False)
        self.collectives.count_messages_from(f"run {self.schedules.current()}")

    def _step_of_run(self, run: int) -> RunningStep | None:
        """Return what a message in a run of a pipeline schedule belongs to."""
        if run == self.clock.eval_run:
            scope = self._eval_scope
            if scope is None or scope.is_muted:
                return None
            return RunningStep(Mode.EVAL, scope.step, False)
        mode = self._mode_of_run
        step = self.clock.step_of_next_run(mode, self.optimizers.exists)
        if run == self.clock.train_run:
            mode, step = Mode.TRAIN, self.clock.train
        if mode is Mode.TRAIN and step == self.clock.train:
            is_traced = self.traced_train is not None
        else:
            is_traced = self.chosen.expects(step)
        return RunningStep(mode, step, False) if is_traced else None

    def _running_step(self, is_message: bool) -> RunningStep | None:
        """Return what a collective outside every module call belongs to; None where that is not
        traced.

        Args:
            is_message: a send or a receive, which behind an optimizer step belongs to the step that
                is about to begin: a pipeline stage receives before its own forward. Other
                collectives there are still of the step that has ended; behind the last that is
                traced they are left alone, for there ranks wait on checkpoints, not on each other.
        """
        is_inside = self.clock.is_inside_optimizer
        is_busy = is_inside or current_graph_task() != -1
        run = self.schedules.current() if is_message and not is_busy else None
        if run is not None:
            return self._step_of_run(run)
        if self._eval_scope is not None and not is_busy:
            scope = self._eval_scope
            return None if scope.is_muted else RunningStep(Mode.EVAL, scope.step, False)
        if self.clock.train < 0:
            mode = Mode.TRAIN if self.optimizers.exists() else Mode.EVAL
            step = self.clock.eval + 1 if mode is Mode.EVAL else 0
            return RunningStep(mode, step, False) if self.chosen.expects(step) else None
        if self.clock.is_ended and not is_busy:
            mode = Mode.EVAL if is_message and not torch.is_grad_enabled() else Mode.TRAIN
            step = 1 + (self.clock.train if mode is Mode.TRAIN else self.clock.eval)
            if not self.chosen.expects(step):
                return None
            if is_message:
                return RunningStep(mode, step, False)
        if self.traced_train is None:
            return None
        return RunningStep(Mode.TRAIN, self.traced_train, is_inside)
