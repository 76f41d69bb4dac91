"""What happens where a step begins or ends: hooks tell the step machine what they see, and its
answers turn tracing on and off.

In every step, traced or not, two hooks on optimizers stand. An optimizer step puts one pre-hook on,
`_watch`, which notices the next root forward; in an untraced step it then takes itself off.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from rankscope.agent.collectives import CollectiveTracing
from rankscope.agent.guard import Guard, say
from rankscope.agent.hooks.calls import Scope
from rankscope.agent.hooks.install import HookSet
from rankscope.agent.hooks.modules import (
    ModuleInfo,
    ModuleTable,
    Root,
    modules_of,
    parameters_of_module,
)
from rankscope.agent.hooks.tracer import Tracer
from rankscope.agent.pythonstack import has_room_for, is_setting_up, module_calls_running
from rankscope.agent.steps.chosen import Agreement, ChosenSteps
from rankscope.agent.steps.optimizers import (
    HIDDEN,
    EagerStance,
    HiddenSteps,
    OptimizerSearch,
    ScalerWatch,
    ScheduleWatch,
    held_parameters,
    outermost_modules_of,
    runs_closure,
    steps_running,
)
from rankscope.agent.steps.stepmachine import RunningStep, StepMachine, Tick
from rankscope.agent.steps.updates import Updates
from rankscope.agent.values.rootevents import RootEvents
from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.distributed import process_groups, stage_modules
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.call import Mode
from rankscope.record.ranks import EndReason
from rankscope.run.agreements import Order
from rankscope.settings import Settings
from rankscope.spool.recordformat import StepEvent


class Stepping:
    """Begins and ends the steps of one session, as its `machine` says."""

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        open_session: Callable[[], bool],
        close_session: Callable[[EndReason], None],
    ) -> None:
        """`open_session` opens the spool and calls `open`; False where that is not traced."""
        self._guard = guard
        self._open_session = open_session
        self._close_session = close_session
        self.optimizers = OptimizerSearch(guard)
        self.optimizers.install()
        self.chosen = ChosenSteps(settings.steps)
        self.machine = StepMachine(self.chosen, self.optimizers.exists)
        self.sides = SideNetworks(self.optimizers, self._record_setup)
        self.table = ModuleTable(
            enters_compiled=settings.compile == "eager",
            paths=settings.paths,
            find_network=self.sides.trained_network_of,
        )
        self._ordered: tuple[Order, ...] = ()
        self.preferred: list[nn.Module] = []
        """Modules to be roots, until the session is open."""
        self._expected: Root | None = None
        """Root whose wrapper has just been counted by `_watch`."""
        self._train_scope: Scope | None = None
        self._eval_scope: Scope | None = None
        self._eval_calls: Counter[Root] = Counter()
        self._hidden = HiddenSteps()
        self._stance = EagerStance(is_wanted=settings.compile == "eager")
        self._stance.choose(is_eager=0 in settings.steps)
        self._scalers = ScalerWatch(guard.hook(self._optimizer_skipped))
        self._schedules = ScheduleWatch(guard.hook(self._run_begins))
        self.collectives = CollectiveTracing(guard, settings, open_session, self._running_step)
        if 0 in settings.steps:
            self.collectives.expect_step(is_first=True)
        self.hooks = HookSet(guard, self._watch)
        self.hooks.watch_optimizers(self._optimizer_begins, self._optimizer_ends)
        self.hooks.watch_for_step()

    def open(
        self, rank: int, tracer: Tracer, events: RootEvents, updates: Updates, agreement: Agreement
    ) -> None:
        """Take what an open spool gives: no step begins before."""
        self._rank, self._recorder, self._values = rank, events.recorder, events.values
        self._tracer, self._events, self._updates = tracer, events, updates
        updates.accumulated.running_step = self._accumulating_step
        self.collectives.open(events.recorder, events.values, tracer, self.table)
        self.chosen.watch_files(events.recorder, rank, agreement)

    # ------------------------------------------------------------------ a module is called

    def _watch(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None
    ) -> None:
        """The one hook of an untraced step: is this the next root forward?"""
        machine, info = self.machine, self.table.get(module)
        # asked first: in an untraced eval step this runs at every call, until the next root's
        if info is not None and self._is_inside(info):
            return
        if current_graph_task() != -1:
            return
        if (
            info is None
            and not any(module is root_module for root_module in self.preferred)
            and next(parameters_of_module(module), None) is None
        ):
            return
        if not self._open_session():
            return
        frozen = self.sides.frozen
        if info is None and frozen is not None and module_calls_running() > 1:
            with invisible():
                info = self.table.learn(module, frozen)
            if self.sides.is_called_by_frozen(info.root) or self._is_inside(info):
                return
        if machine.is_train_over and info is not None and _is_train_forward(info, module):
            self.hooks.stop_watching()  # until the next optimizer step
            return
        expected, self._expected = self._expected, None
        if info is not None and info.root is expected and not info.is_wrapper:
            return  # the wrapper around it has just been counted
        self._tracer.before_forward(module, args, kwargs)
        info = self.table.get(module)
        if info is not None and info.is_wrapper:
            self._expected = info.root

    def _is_inside(self, info: ModuleInfo) -> bool:
        """True for a module that is no root, while a step runs: it begins none."""
        return info.root is None or (info.path != "" and not self.machine.is_ended)

    def open_scope(self, info: ModuleInfo, module: nn.Module) -> Scope | None:
        """Say to which step an outermost call belongs; turn tracing on or off where one begins."""
        machine, root = self.machine, info.root
        if is_setting_up():
            step = max(machine.train, 0)
            is_seen = self.hooks.is_tracing
            return Scope(root, Mode.TRAIN, step, None, is_muted=True) if is_seen else None
        # asked behind that: gradients are off there in torch 2.8, so the run would be for an eval
        run = self._schedules.current()
        if root is None:
            return self._loose_scope()
        last = self._train_scope if torch.is_grad_enabled() else self._eval_scope
        if info.path and last is not None and last.root is root and not machine.is_ended:
            return last  # a submodule called directly, inside the step its root has begun
        self._record_setup(root)
        if not has_room_for(root.depth):
            self._leave_too_deep(root)
            return None
        if machine.is_inside_optimizer:
            machine.set_optimizer_depth(steps_running())
        tick = machine.root_forward(has_gradients=_is_train_forward(info, module), run=run)
        if tick.mode is Mode.EVAL:
            self.sides.frozen = root if torch.is_grad_enabled() else None
            return self._eval_forward(tick, root)
        self.sides.frozen = None
        self._hidden.root_was_seen()
        self._updates.training_threads.add(threading.get_ident())
        if tick.opens_step:
            self._begin_train(tick.step)
        if machine.traced_train is None:
            return None
        self._train_scope = Scope(root, Mode.TRAIN, tick.step, root.calls_in_step, is_muted=False)
        root.calls_in_step += 1
        self._updates.accumulated.forward_begins()
        return self._train_scope

    def _loose_scope(self) -> Scope:
        machine, is_train = self.machine, torch.is_grad_enabled()
        scope = self._train_scope if is_train else self._eval_scope
        if scope is not None:
            return scope
        mode, step = (Mode.TRAIN, machine.train) if is_train else (Mode.EVAL, machine.eval)
        return Scope(None, mode, max(step, 0), None, is_muted=machine.traced_train is None)

    def _eval_forward(self, tick: Tick, root: Root) -> Scope | None:
        machine = self.machine
        if tick.opens_step:
            self._end_eval()
            if self._is_traced(Mode.EVAL, tick.step):
                self._turn_on(Mode.EVAL, tick.step)
            elif not machine.is_eval_open:
                self._turn_off()
        if not machine.is_eval_open:
            return None
        self._eval_scope = Scope(
            root, Mode.EVAL, tick.step, self._eval_calls[root], is_muted=machine.traced_eval is None
        )
        self._eval_calls[root] += 1
        return self._eval_scope

    def _leave_too_deep(self, root: Root) -> None:
        text = (
            f"{root.class_name} nests {root.depth} modules deep: with hooks on, Python's recursion "
            f"limit ({sys.getrecursionlimit()}) leaves no room for it; tracing is switched off. "
            "Raise it with sys.setrecursionlimit to trace this model"
        )
        self._recorder.error(None, text)
        say(text)
        self._close_session(EndReason.SWITCHED_OFF)

    # ------------------------------------------------------------------ an optimizer steps

    def _optimizer_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        machine = self.machine
        if machine.is_train_over:
            return
        self.optimizers.saw(optimizer)
        self._scalers.stepped()
        # one less: the step that begins now is on the stack already
        machine.set_optimizer_depth(steps_running() - 1)
        if not machine.optimizer_begins():
            return
        has_closure = runs_closure(args, kwargs)
        if not has_closure:  # which may run the forward inside the step
            self._begin_hidden_step(optimizer)
        if machine.traced_train is not None:
            self._updates.begins(optimizer, machine.traced_train, has_closure=has_closure)

    def _optimizer_ends(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        machine = self.machine
        if machine.is_train_over:
            self.hooks.watch_for_step()
            return
        has_closure = runs_closure(args, kwargs)
        if has_closure:
            self._begin_hidden_step(optimizer)
        was_ended = machine.is_ended
        if not machine.optimizer_ends():
            return
        if machine.traced_train is not None:
            self._updates.ends(optimizer, machine.traced_train, has_closure=has_closure)
            if current_graph_task() == -1:  # in backward there is one optimizer for each parameter
                self._values.flush()
        else:
            self.hooks.watch_for_step()
        is_next = machine.expects_next_train()
        # now, because the next forward of a model compiled in place is only seen if it runs eagerly
        self._stance.choose(is_eager=is_next)
        if is_next:
            self.collectives.expect_step(is_first=False)
        if not was_ended and current_graph_task() == -1:  # in backward each rank is elsewhere
            self.collectives.count_messages_from(f"train {machine.train + 1}")

    def _accumulating_step(self) -> int | None:
        """Return the traced train step that gathers gradients. None inside an optimizer's step,
        whose closure makes its own, and while another thread may write gradients."""
        if self.machine.is_inside_optimizer or self._updates.are_threads_training:
            return None
        return self.machine.traced_train

    def _optimizer_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.machine.traced_train is not None:
            self._updates.skipped(optimizer, self.machine.traced_train)

    def _begin_hidden_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the train step whose forward was not seen, or not taken for one that trains."""
        machine = self.machine
        is_first = machine.train < 0
        is_hidden = self._hidden.begins(optimizer, is_first=is_first)
        is_side = self.sides.trains_side_of_frozen(optimizer)
        if not (is_hidden or is_side) or not (is_first or machine.is_ended):
            return
        if is_first and not is_side and not self._learn_hidden_roots(optimizer):
            return
        step = machine.root_forward(has_gradients=True).step
        self._end_eval()
        self._end_train()
        # hooks stay as they are: each change of theirs would compile the model again
        if self._is_traced(Mode.TRAIN, step):
            self._recorder.step(StepEvent.BEGIN, Mode.TRAIN, step)
            for info in self.table.hidden_roots():
                self._tracer.note_hidden_root(info, step)

    def _learn_hidden_roots(self, optimizer: torch.optim.Optimizer) -> bool:
        modules = outermost_modules_of(optimizer)
        if not modules or not self._open_session():
            return False
        for module in modules:
            with invisible():
                root = self.table.learn(module, None).root
            if root is not None:
                root.is_hidden = True
                self._record_setup(root)
        if self._rank == 0:
            say(f"{type(modules[0]).__name__}: {HIDDEN}")
        return True

    # ------------------------------------------------------------------ a pipeline, a collective

    def _run_begins(self, schedule: object) -> None:
        if self.machine.expects_run():
            modules = stage_modules(schedule)
            needs_gradient = torch.is_grad_enabled() and (
                not modules
                or any(p.requires_grad for stage in modules for p in parameters_of_module(stage))
            )
            if self.machine.run_begins(Mode.TRAIN if needs_gradient else Mode.EVAL):
                self.collectives.expect_step(is_first=False)
        self.collectives.count_messages_from(f"run {self._schedules.current()}")

    def _running_step(self, is_message: bool) -> RunningStep | None:
        """Return the traced step of a collective outside every module call."""
        is_busy = self.machine.is_inside_optimizer or current_graph_task() != -1
        run = None if is_busy else self._schedules.current()
        if run is not None:
            return self.machine.step_of_run(run)
        if self.collectives.awaits_first and not is_message:
            return None
        return self.machine.step_of_collective(
            is_message=is_message, is_busy=is_busy, has_gradients=torch.is_grad_enabled()
        )

    # ------------------------------------------------------------------ steps begin and end

    def _begin_train(self, step: int) -> None:
        self._end_eval()
        self._end_train()
        if self._is_traced(Mode.TRAIN, step):
            self._turn_on(Mode.TRAIN, step)
            return
        self._turn_off()
        if self.machine.is_train_over or self.optimizers.exists():
            self.hooks.stop_watching()

    def _is_traced(self, mode: Mode, step: int) -> bool:
        is_traced = self.machine.begins(mode, step)
        orders = self.chosen.ordered
        if orders != self._ordered:
            self._ordered = orders
            paths = tuple(glob for order in orders for glob in order.paths)
            self.table.select_also(paths)
            self.collectives.select_also(paths)
            self._values.keep_too(tuple(glob for order in orders for glob in order.tensors))
        return is_traced

    def _end_train(self) -> None:
        for root in self.table.roots:
            root.calls_in_step = 0
        self._train_scope = None
        step = self.machine.end_train()
        if self._guard.is_too_deep:
            self._guard.is_too_deep = False
            self._recorder.error(None, "Python's recursion limit left a hook no room: calls lack")
        if step is not None:
            self._updates.close_step(step)
            self.collectives.end_step(Mode.TRAIN, step)
            self._recorder.step(StepEvent.END, Mode.TRAIN, step)
            self._tracer.end_step()
            self.table.forget_dead()
            self.define_groups()

    def _end_eval(self) -> None:
        """Close the eval step; hooks stayed on behind it for the loss that may follow its root."""
        self._eval_scope = None
        self._eval_calls.clear()
        step = self.machine.end_eval()
        if step is not None:
            self.collectives.end_step(Mode.EVAL, step)
            self._recorder.step(StepEvent.END, Mode.EVAL, step)
            if self.machine.traced_train is None:
                self._tracer.end_step()

    def end_steps(self) -> None:
        """Close whatever is open: the session ends."""
        self._end_eval()
        self._end_train()
        self.collectives.close()

    def define_groups(self) -> None:
        """Write down the process groups made since the last time; read off torch's tables."""
        for group in process_groups():
            self._recorder.group(group)

    def _record_setup(self, root: Root) -> None:
        if not root.is_setup_recorded:
            root.is_setup_recorded = True
            with self._recorder.never_let_go():
                self._events.setup(root)

    def _turn_on(self, mode: Mode, step: int) -> None:
        self._values.collect()  # of the step before: what accelerators have finished by now
        self._stance.choose(is_eager=True)
        # BEGIN before any hook is on: no record of the step may lie before it
        self._recorder.step(StepEvent.BEGIN, mode, step, self._stance.note)
        self.hooks.trace()
        self._scalers.install()
        self.collectives.install()

    def _turn_off(self) -> None:
        if self.hooks.is_tracing:
            self.hooks.stop_tracing()
        self._stance.choose(is_eager=False)
        self._scalers.uninstall()
        if not (self.machine.is_ended and self.machine.expects_next_train()):
            self.collectives.uninstall()
        self.hooks.watch_for_step()

    def remove_hooks(self, *, is_inside_hook: bool = False) -> None:
        """Leave torch as it was."""
        self.hooks.remove_all(is_inside_hook=is_inside_hook)
        self.optimizers.uninstall()
        self._scalers.uninstall()
        self._schedules.uninstall()
        self.collectives.uninstall()
        self._stance.choose(is_eager=False)


def _is_train_forward(info: ModuleInfo, module: nn.Module) -> bool:
    if info.root is None or not torch.is_grad_enabled():
        return False
    with invisible():
        return info.root.builds_graph(module)


class SideNetworks:
    """Networks that a frozen model's modules call and do not hold: adapters in place of the layers'
    own `forward`. The model's forward builds a graph when theirs does."""

    def __init__(self, optimizers: OptimizerSearch, record_setup: Callable[[Root], None]) -> None:
        self._optimizers = optimizers
        self._record_setup = record_setup
        self.frozen: Root | None = None
        """Root whose last forward could have built a graph and reached no trainable parameter."""

    def trained_network_of(self, module: nn.Module) -> nn.Module | None:
        """Return the outermost module that holds `module`, where an optimizer trains it."""
        parameters = frozenset(map(id, parameters_of_module(module)))
        optimizer = self._optimizers.holder_of(parameters)
        if optimizer is None:
            return None
        for network in outermost_modules_of(optimizer):
            if any(child is module for _, child in modules_of(network)):
                return network
        return None

    def is_called_by_frozen(self, side: Root | None) -> bool:
        """True for a root of its own that modules of the frozen root call; takes note of that."""
        if self.frozen is None or side is None or side is self.frozen:
            return False
        self.called(self.frozen, side)
        return True

    def called(self, root: Root | None, side: Root) -> None:
        """Note a network that modules of a root call and do not hold: from the next forward on the
        root builds a graph where the network would."""
        if root is None or side is root or side in root.sides:
            return
        root.sides.append(side)
        self._record_setup(side)

    def trains_side_of_frozen(self, optimizer: torch.optim.Optimizer) -> bool:
        """True where an optimizer trains a side network of the frozen root; asked once a root."""
        frozen, self.frozen = self.frozen, None
        if frozen is None:
            return False
        parameters = held_parameters(optimizer)
        return any(
            id(parameter) in parameters
            for side in frozen.sides
            if (top := side.module()) is not None
            for parameter in parameters_of_module(top)
        )
