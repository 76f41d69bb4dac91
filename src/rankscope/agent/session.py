"""One session: from the first module call of a process to its end record.

The session joins the parts: the clock says which step a root forward belongs to, the hook set is
turned on and off accordingly, the tracer records calls, the parameter events record whole roots. In
an untraced step nothing but the optimizer hooks is left; an optimizer step arms one pre-hook that
notices the next root forward and takes itself off.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rankscope.agent.calls import Scope
from rankscope.agent.chosen import ChosenSteps
from rankscope.agent.clock import StepClock
from rankscope.agent.collectives_tracing import CollectiveTracing, RunningStep
from rankscope.agent.compiling import HIDDEN, EagerStance, HiddenSteps, outermost_modules_of
from rankscope.agent.guard import MAX_FAILURES, Guard, say, text_of
from rankscope.agent.hooks import HookSet
from rankscope.agent.keeper import Keeper
from rankscope.agent.members import parameters_of_module
from rankscope.agent.modules import ModuleInfo, ModuleTable, Root
from rankscope.agent.optimizers import OptimizerSearch, runs_closure, steps_running
from rankscope.agent.parameters import ParameterEvents
from rankscope.agent.recorder import Recorder
from rankscope.agent.scalers import ScalerWatch
from rankscope.agent.settings import Settings
from rankscope.agent.stack import explain_no_room, has_room_for, is_inferring_shapes
from rankscope.agent.tracer import Tracer
from rankscope.agent.updates import Updates
from rankscope.agent.values import ValueReader
from rankscope.capture.describe import Describer
from rankscope.capture.groups import process_groups
from rankscope.capture.invisible import invisible
from rankscope.capture.torch_internals import current_graph_task, dynamo_has_compiled
from rankscope.record.call import Mode
from rankscope.record.globs import glob_matches
from rankscope.record.run import EndReason, RankIdentity
from rankscope.spool.cells import StepEvent
from rankscope.spool.writer import SpoolWriter

__all__ = ["Opened", "Session"]

_Call = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A spool that was opened for this process, its identity already written."""

    identity: RankIdentity
    writer: SpoolWriter
    recorder: Recorder
    meeting_place: Path | None = None
    """Folder in which the traced ranks agree on a step, None for a rank that is alone."""
    keeper: Keeper | None = None
    """Keeps full tensors, None where none were asked for."""
    is_launched: bool = False
    """A launcher of ours has the last word on the trace."""


class Session:
    """Traces this process into one spool until it is closed."""

    def __init__(
        self,
        settings: Settings,
        start: Callable[[], Opened | None],
        preferred_root: nn.Module | None = None,
        say_leaf: Callable[[object], str] | None = None,
    ) -> None:
        """Arm a session; nothing is opened before the first module call.

        Args:
            settings: what to trace.
            start: opens the spool at the first root forward and writes who this rank is; None
                where this process is not to be traced (and says so itself).
            preferred_root: the module whose path is to be "", by default the largest root called.
            say_leaf: text of an argument that is no tensor, in the form of a call; by default one
                for which no code of the program runs.
        """
        self._settings = settings
        self._say_leaf = say_leaf
        self._start = start
        self._preferred = [] if preferred_root is None else [preferred_root]
        self._beginning = threading.RLock()
        """Held by the thread that opens the session or begins a step: others' forwards may come at
        the same moment."""
        self._opened: Opened | None = None
        self._writer: SpoolWriter | None = None
        """Set when all else is there."""
        self._is_closed = False
        self._clock = StepClock()
        self._optimizers = OptimizerSearch()
        self._train_scope: Scope | None = None
        self._eval_scope: Scope | None = None
        self._traced_train: int | None = None
        """Number of the train step being traced."""
        self._chosen = ChosenSteps(settings.steps)
        self._is_train_over = False
        """No later train step can be traced: only evaluation is still watched for."""
        self._hidden = HiddenSteps()
        self._stance = EagerStance(is_wanted=settings.compile == "eager")
        self._stance.choose(is_eager=0 in settings.steps)
        self._expected: Root | None = None
        """Root whose wrapper has just been counted by `_watch`."""
        self.guard = Guard(self._failed)
        self._scalers = ScalerWatch(self.guard.hook(self._optimizer_skipped))
        self._collectives = CollectiveTracing(self.guard, settings, self._open, self._running_step)
        if 0 in settings.steps:
            self._collectives.expect_step(is_first=True)
        self._hooks = HookSet(self.guard, self._watch)
        self._hooks.watch_optimizers(self._optimizer_begins, self._optimizer_ends)
        self._hooks.watch_for_step()
        myself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _disarm(myself()))

    # ------------------------------------------------------------------ life

    def _open(self) -> bool:
        """Open the spool at the first call that matters; False where this process is not traced."""
        if self._writer is not None:
            return True
        with self._beginning:
            return self._writer is not None or self._open_now()

    def _open_now(self) -> bool:
        if self._is_closed:
            return False
        start, self._start = self._start, lambda: None  # once, even where it fails
        opened = start()
        if opened is None:
            self.disarm(is_inside_hook=True)
            return False
        self._opened = opened
        self._rank = opened.identity.rank
        self._recorder, self._keeper = opened.recorder, opened.keeper
        self._is_launched = opened.is_launched
        settings = self._settings
        self._table = ModuleTable(enters_compiled=settings.compile == "eager", paths=settings.paths)
        self._values = ValueReader(self._recorder, Describer(self._rank), settings, self._keeper)
        self._values.say = self._say_leaf or self._values.say
        self._tracer = Tracer(
            self.guard, self._recorder, self._table, self._values, settings, self._begin_scope,
            self._hooks.stands_behind_inputs_of, self._hooks.stands_behind_outputs_of,
            self._follow_own_hooks, self._hooks.leave_modules,
        )  # fmt: skip
        self._collectives.open(self._recorder, self._values, self._tracer, self._table)
        self._parameters = ParameterEvents(
            self._table, self._recorder, self._values, self._tracer.definition_of, settings.phases
        )
        self._updates = Updates(self._table, self._recorder, self._parameters, self._optimizers)
        tracer = self._tracer
        self._hooks.follow_with(
            before=tracer.before_forward,
            after=tracer.after_forward,
            own_input=tracer.own_input_hook,
            own_output=tracer.own_output_hook,
        )
        self._chosen.watch_file(self._recorder, self._rank, opened.meeting_place)
        preferred, self._preferred = self._preferred, []
        for module in preferred:
            self._prefer(module)
        self._writer = opened.writer
        return True

    def close(self, reason: EndReason = EndReason.EXIT) -> None:
        """End the open step, commit the end record and take every hook off; safe to call again."""
        if self._is_closed:
            self._hooks.remove_all()  # which a hook could only ask for
            return
        self._is_closed = True
        self._remove_hooks()
        if self._writer is None:
            if dynamo_has_compiled():
                say(f"nothing was traced: {HIDDEN}")
            return
        self._end_eval()
        self._end_train()
        self._collectives.close()
        self._values.collect(wait=True)
        self._define_groups()
        self._report_unmatched_globs()
        if self._keeper is not None:
            with invisible():
                self._keeper.close()
        if reason is not EndReason.SWITCHED_OFF:  # which says why itself
            self._report_no_step()
        self._chosen.close()
        self._writer.close(reason)

    def _report_unmatched_globs(self) -> None:
        """Say which globs of the setting `paths` matched no module: most likely they are
        misspelt.
        """
        known = self._table.paths()
        for glob in self._settings.paths:
            if glob not in ("*", "**") and not any(glob_matches(glob, path) for path in known):
                near = ", ".join(sorted(known - {""})[:5]) or "none at all"
                text = f"paths: {glob!r} matched no module; modules here are {near} ..."
                self._recorder.error(None, text)
                if self._rank == 0:
                    say(f"{text} Globs match the whole path: write '*.name' or 'layers.0.*'")

        for glob in () if self._keeper is None else self._keeper.unmatched_globs():
            text = f"tensors: {glob!r} took nothing: no traced slot of any module has that name"
            self._recorder.not_kept(glob, text)
            if self._rank == 0:
                say(f"{text}. Write path:slot, such as 'layers.0.*:output' or '**:param:*'")

    def _report_no_step(self) -> None:
        """Say that the job ended before any step it was to trace."""
        text = self._chosen.none_traced(self._clock.train, self._clock.eval)
        if text:
            self._recorder.error(None, text)
            if self._rank == 0 and not self._is_launched:
                say(text)

    def disarm(self, *, is_inside_hook: bool = False) -> None:
        """Stop without a word in the spool: a forked child, or a process that is not to be
        traced.
        """
        self._is_closed = True
        self._remove_hooks(is_inside_hook=is_inside_hook)

    def _remove_hooks(self, *, is_inside_hook: bool = False) -> None:
        self._hooks.remove_all(is_inside_hook=is_inside_hook)
        self._scalers.take_off()
        self._collectives.take_off()
        self._stance.choose(is_eager=False)

    def step(self) -> None:
        """Close the current train step by hand."""
        self._clock.step()
        if not self._is_closed:
            self._hooks.watch_for_step()

    def _failed(self, error: Exception) -> None:
        if self._is_closed:
            return
        if self._writer is None:
            self.disarm()
            say(f"not tracing: {text_of(error)}")
            opened = self._opened or self._start()
            if opened is not None:  # else a trace without a record would call itself complete
                opened.recorder.error(None, text_of(error)[:500])
                opened.writer.close(EndReason.SWITCHED_OFF)
            return
        self._recorder.error(self._tracer.current_sequence(), text_of(error)[:500])
        if self.guard.failures >= MAX_FAILURES:
            say(
                f"tracing is switched off on rank {self._rank} after {MAX_FAILURES} failures, "
                f"last: {text_of(error)}"
            )
            self.close(EndReason.SWITCHED_OFF)

    # ------------------------------------------------------------------ several models

    def prefer(self, module: nn.Module) -> None:
        """Make one more module a root, parameters or not, unless it lives in one."""
        with self._beginning, invisible():
            if self._writer is None:
                self._preferred.append(module)
            else:
                self._prefer(module)

    def _prefer(self, module: nn.Module) -> None:
        self._table.prefer(module)
        for inner, _, _ in self._table.contained:  # to be written down by number
            held = inner.module()
            info = None if held is None else self._table.get(held)
            if info is not None:
                self._tracer.definition_of(info)

    def place_of(self, module: nn.Module) -> tuple[int, str]:
        """Return the number of the root a module belongs to, 0 for none so far, and its path
        there.
        """
        info = None if self._writer is None else self._table.get(module)
        if info is None:
            return 0, ""
        return (0 if info.root is None else info.root.definition), info.path

    def settle(self) -> None:
        """Have everything on disk that calls which have ended left behind."""
        if self._writer is not None:
            self._values.collect(wait=True)

    # ------------------------------------------------------------------ hooks

    def call(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], forward: _Call
    ) -> object:
        """Call a module's `forward` as `Module.__call__` does, but for its own hooks.

        For a program that calls `forward` itself: no hook of torch's sees that.
        """
        self._hooks.enter(module, args, kwargs)
        ended: tuple[object, ...] = (None,)  # as torch tells a hook that `forward` raised
        try:
            output = forward(*args, **kwargs)
            ended = (kwargs, output)
        finally:
            self._hooks.leave(module, args, *ended)
        return output

    def _watch(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None = None,
    ) -> None:
        """The one hook of an untraced step: is this the next root forward?"""
        if current_graph_task() != -1:
            return
        info = self._table.get(module) if self._writer is not None else None
        is_chosen = any(module is each for each in self._preferred)
        if info is None and not is_chosen and next(parameters_of_module(module), None) is None:
            return
        if not self._open():
            return
        if info is not None and (info.root is None or (info.path and not self._clock.is_ended)):
            return
        if self._is_train_over and info is not None and self._is_train_forward(info, module):
            self._hooks.stop_watching()  # until the next optimizer step
            return
        expected, self._expected = self._expected, None
        if info is not None and info.root is expected and not info.is_wrapper:
            return  # the wrapper around it has just been counted
        self._tracer.before_forward(module, args, kwargs)
        info = self._table.get(module)
        if info is not None and info.is_wrapper:
            self._expected = info.root

    def _optimizer_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self._is_train_over:
            return
        self._optimizers.saw(optimizer)
        self._scalers.stepped()
        self._clock.set_optimizer_depth(steps_running() - 1)
        if not self._clock.optimizer_begins():
            return
        has_closure = runs_closure(args, kwargs)
        if not has_closure:  # which may run the forward inside the step
            self._begin_hidden_step(optimizer)
        if self._traced_train is not None:
            self._updates.begins(optimizer, self._traced_train, has_closure=has_closure)

    def _optimizer_ends(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self._is_train_over:
            self._hooks.watch_for_step()
            return
        has_closure = runs_closure(args, kwargs)
        if has_closure:
            self._begin_hidden_step(optimizer)
        if not self._clock.optimizer_ends():
            return
        if self._traced_train is not None:
            self._updates.ends(optimizer, self._traced_train, has_closure=has_closure)
        else:
            self._hooks.watch_for_step()
        is_next = self._chosen.expects(self._clock.train + 1)
        # now, because the next forward of a model compiled in place is only seen if it runs eagerly
        self._stance.choose(is_eager=is_next)
        if is_next:
            self._collectives.expect_step(is_first=False)

    def _optimizer_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._traced_train is not None:
            self._updates.skipped(optimizer, self._traced_train)

    # ------------------------------------------------------------------ steps

    def _begin_scope(self, info: ModuleInfo, module: nn.Module) -> Scope | None:
        with self._beginning:
            return self._open_scope(info, module)

    def _open_scope(self, info: ModuleInfo, module: nn.Module) -> Scope | None:
        """Say which step an outermost call belongs to; turn tracing on or off where a step
        begins.
        """
        root = info.root
        if is_inferring_shapes():  # no part of any step: what it computes is garbage
            step = max(self._clock.train, 0)
            is_seen = self._hooks.is_tracing
            return Scope(root, Mode.TRAIN, step, None, is_muted=True) if is_seen else None
        if root is None:
            return self._loose_scope()
        last = self._train_scope if torch.is_grad_enabled() else self._eval_scope
        if info.path and last is not None and last.root is root and not self._clock.is_ended:
            return last  # a submodule called directly, inside the step its root has begun
        self._record_setup(info)
        if not has_room_for(root.depth):
            self._leave_too_deep(root)
            return None
        if self._clock.is_inside_optimizer:
            self._clock.set_optimizer_depth(steps_running())
        tick = self._clock.root_forward(
            has_gradients=self._is_train_forward(info, module),
            optimizer_exists=self._optimizers.exists,
        )
        if tick.mode is Mode.EVAL:
            return self._begin_eval(tick.step, info)
        self._hidden.root_was_seen()
        if tick.opened:
            self._begin_train(tick.step)
        if self._traced_train is None:
            return None
        self._train_scope = Scope(root, Mode.TRAIN, tick.step, root.calls_in_step, is_muted=False)
        root.calls_in_step += 1
        return self._train_scope

    def _is_train_forward(self, info: ModuleInfo, module: nn.Module) -> bool:
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
            (Mode.TRAIN, self._clock.train)
            if torch.is_grad_enabled()
            else (Mode.EVAL, self._clock.eval)
        )
        return Scope(None, mode, max(step, 0), None, is_muted=self._traced_train is None)

    def _begin_hidden_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the train step that an optimizer ends although no hook saw its forward."""
        is_first = self._clock.train < 0
        if not self._hidden.begins(optimizer, is_first=is_first):
            return
        if not (is_first or self._clock.is_ended):
            return
        if is_first:
            modules = outermost_modules_of(optimizer)
            if not modules or not self._open():
                return
            for module in modules:
                info = self._tracer.learn(module)
                if info.root is not None:
                    info.root.is_hidden = True
                    self._record_setup(info)
            if self._rank == 0:
                say(f"{type(modules[0]).__name__}: {HIDDEN}")
        step = self._clock.root_forward(has_gradients=True, optimizer_exists=lambda: True).step
        self._end_eval()
        self._end_train()
        # hooks stay as they are: each change of theirs would compile the model again
        if self._chosen.begins(Mode.TRAIN, step):
            self._traced_train = step
            self._recorder.step(StepEvent.BEGIN, Mode.TRAIN, step)
            for info in self._table.hidden_roots():
                self._tracer.note_hidden_root(info, step)

    def _leave_too_deep(self, root: Root) -> None:
        """Switch off before a model that nests so deep that hooks would end its own calls."""
        text = explain_no_room(root.class_name, root.depth)
        self._recorder.error(None, text)
        say(text)
        self.close(EndReason.SWITCHED_OFF)

    def _begin_train(self, step: int) -> None:
        """Leave the steps before and begin this one, traced or not."""
        self._end_eval()
        self._end_train()
        if self._chosen.begins(Mode.TRAIN, step):
            self._traced_train = step
            self._turn_on(Mode.TRAIN, step)
        else:
            self._turn_off()
            self._is_train_over = self._chosen.is_over(step)
            if self._is_train_over or self._optimizers.exists():
                self._hooks.stop_watching()

    def _end_train(self) -> None:
        for root in self._table.roots:
            root.calls_in_step = 0
        step, self._traced_train, self._train_scope = self._traced_train, None, None
        if self.guard.is_too_deep:
            self.guard.is_too_deep = False
            self._recorder.error(None, "Python's recursion limit left a hook no room: calls lack")
        if step is not None:
            self._updates.close_step(step, is_trained=self._tracer.gradients.has_fired)
            self._collectives.end_step(Mode.TRAIN, step)
            self._recorder.step(StepEvent.END, Mode.TRAIN, step)
            self._tracer.end_step()
            self._table.forget_dead()
            self._define_groups()

    def _begin_eval(self, step: int, info: ModuleInfo) -> Scope | None:
        self._end_eval()
        is_selected = self._chosen.begins(Mode.EVAL, step)
        if is_selected:
            self._eval_scope = Scope(info.root, Mode.EVAL, step, 0, is_muted=False)
            self._turn_on(Mode.EVAL, step)
        elif self._traced_train is not None:
            self._eval_scope = Scope(info.root, Mode.EVAL, step, 0, is_muted=True)
        else:
            self._turn_off()
        return self._eval_scope

    def _end_eval(self) -> None:
        """Close the eval step; hooks stayed on behind it for the loss that may follow its root."""
        scope, self._eval_scope = self._eval_scope, None
        if scope is not None and not scope.is_muted:
            self._collectives.end_step(Mode.EVAL, scope.step)
            self._recorder.step(StepEvent.END, Mode.EVAL, scope.step)
            if self._traced_train is None:
                self._tracer.end_step()

    def _define_groups(self) -> None:
        """Write down the process groups made since the last time; read off torch's tables."""
        for group in process_groups():
            self._recorder.group(group)

    def _turn_on(self, mode: Mode, step: int) -> None:
        self._values.collect()  # of the step before: what accelerators have finished by now
        self._stance.choose(is_eager=True)
        self._recorder.step(StepEvent.BEGIN, mode, step, self._stance.note)
        self._hooks.trace()
        self._scalers.put_on()
        self._collectives.put_on()

    def _follow_own_hooks(self, info: ModuleInfo) -> None:
        """Stand behind the hooks of a root's modules while it runs, and not a moment longer.

        A model that is saved or copied between two forwards must carry nothing of ours.
        """
        if info.root is not None:
            self._hooks.trace_own_hooks_of(self._table.with_hooks(info.root))

    def _turn_off(self) -> None:
        if self._hooks.is_tracing:
            self._hooks.stop_tracing()
        self._stance.choose(is_eager=False)
        self._scalers.take_off()
        if not (self._clock.is_ended and self._chosen.expects(self._clock.train + 1)):
            self._collectives.take_off()
        self._hooks.watch_for_step()

    def _running_step(self) -> RunningStep | None:
        """Return what a collective outside every module call belongs to; None where that is not
        traced. Behind an optimizer step that is the next train step.
        """
        is_inside = self._clock.is_inside_optimizer
        is_busy = is_inside or current_graph_task() != -1
        if self._eval_scope is not None and not is_busy:
            scope = self._eval_scope
            return None if scope.is_muted else RunningStep(Mode.EVAL, scope.step, False)
        if self._clock.train < 0:
            mode = Mode.TRAIN if self._optimizers.exists() else Mode.EVAL
            step = self._clock.eval + 1 if mode is Mode.EVAL else 0
            return RunningStep(mode, step, False) if self._chosen.expects(step) else None
        if self._clock.is_ended and not is_busy:
            step = self._clock.train + 1
            return RunningStep(Mode.TRAIN, step, False) if self._chosen.expects(step) else None
        if self._traced_train is None:
            return None
        return RunningStep(Mode.TRAIN, self._traced_train, is_inside)

    def _record_setup(self, info: ModuleInfo) -> None:
        assert info.root is not None  # only called for modules of a root
        if info.root.is_setup_recorded:
            return
        info.root.is_setup_recorded = True
        for each in self._table.of_root(info.root):
            self._tracer.definition_of(each)
        for inner, outer, path in self._table.contained:
            self._recorder.define(
                "inside", root=inner.definition, **{"in": outer.definition}, path=path
            )
        self._table.contained.clear()
        self._parameters.setup(info.root)


def _disarm(session: Session | None) -> None:
    if session is not None:
        session.disarm()
