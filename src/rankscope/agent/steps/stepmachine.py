"""Which step runs, and whether it is traced: one state machine, fed by what hooks see. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rankscope.agent.steps.chosen import ChosenSteps
from rankscope.record.call import Mode


@dataclass(frozen=True, slots=True)
class Tick:
    """Meaning of one root forward."""

    mode: Mode
    step: int
    opens_step: bool
    """True where this forward begins a new step of its mode."""


class RunningStep(NamedTuple):
    """The traced step that something outside every module call belongs to."""

    mode: Mode
    step: int
    is_inside_optimizer: bool


class StepMachine:
    """Counts the train and eval steps of one process, apart from each other.

    Training is in one of three states:

    * before: no train step has begun (`train` is -1);
    * running: train step `train` has begun, and no optimizer has stepped in it;
    * ended: an optimizer has stepped since that step began (`is_ended`).

    Beside it an eval step is open or not. What an event does:

    ======================  =================================  ================================
    event                   before, ended                      running
    ======================  =================================  ================================
    forward, gradients on   the next train step begins         the step goes on; where no
                            (`begins`)                         optimizer exists, the next begins
    forward without         the next eval step begins          the same
    gradients
    an optimizer has        ended                              ended
    stepped
    `rankscope.step()`      ended; from now on only this call ends a step
    ======================  =================================  ================================

    So several optimizers, gradient accumulation and the forwards of one closure are one step, and a
    loop that runs every forward inside a closure (LBFGS, Lightning) has one step per optimizer
    step. A forward inside an optimizer step never begins a step that the optimizer has not ended
    before. Optimizer steps nest (ZeRO calls `super().step()` inside its own): the outermost counts.
    In a run of a pipeline schedule the first forward of a mode is an event, all others belong to
    the same step.

    Whether a step is traced is decided once, by `begins`. The caller ends the step before first
    (`end_train`, `end_eval`), so that what it recorded is complete.
    """

    def __init__(self, chosen: ChosenSteps, optimizer_exists: Callable[[], bool]) -> None:
        """`optimizer_exists` may search the heap: it is asked only where the answer decides."""
        self._chosen_steps = chosen
        self._optimizer_exists = optimizer_exists
        self.train = -1
        self.eval = -1
        self.is_ended = False
        self.traced_train: int | None = None
        self.is_train_over = False
        """No later train step can be traced; only evaluation still can."""
        self.traced_eval: int | None = None
        self.is_eval_open = False
        """A traced eval step runs, or any eval step inside a traced train step."""
        self._train_run: int | None = None
        """Run of a pipeline schedule that the latest train forward was part of."""
        self._eval_run: int | None = None
        self._mode_of_run = Mode.TRAIN
        self._optimizer_depth = 0
        self._is_manual = False

    # ------------------------------------------------------------------ forwards

    def root_forward(self, *, has_gradients: bool, run: int | None = None) -> Tick:
        """Return the step of this root forward, counting a new one where it begins.
        `has_gradients`: it builds a graph that reaches a parameter; `run`: of a pipeline
        schedule."""
        if not has_gradients:
            is_new = run is None or run != self._eval_run
            self._eval_run = run
            self.eval += is_new
            return Tick(Mode.EVAL, self.eval, is_new)
        is_same_run = run is not None and run == self._train_run
        # micro-batches of one run: its first forward has decided for all of them
        self._train_run = run
        if is_same_run:
            return Tick(Mode.TRAIN, self.train, False)
        is_over = self.train < 0 or self.is_ended
        if not is_over and not self._optimizer_depth:  # a closure may run forward several times
            is_over = not self._waits_for_optimizer()
        if is_over:
            self.train += 1
            self.is_ended = False
        return Tick(Mode.TRAIN, self.train, is_over)

    def begins(self, mode: Mode, step: int) -> bool:
        """Decide whether a step that begins is traced."""
        is_traced = self._chosen_steps.begins(mode, step)
        if mode is Mode.EVAL:
            self.traced_eval = step if is_traced else None
            self.is_eval_open = is_traced or self.traced_train is not None
        elif is_traced:
            self.traced_train = step
        else:
            self.is_train_over = self._chosen_steps.is_over(step)
        return is_traced

    def end_train(self) -> int | None:
        """Leave the train step; return its number where it was traced."""
        step, self.traced_train = self.traced_train, None
        return step

    def end_eval(self) -> int | None:
        """Leave the eval step; return its number where it was traced."""
        step, self.traced_eval, self.is_eval_open = self.traced_eval, None, False
        return step

    def _waits_for_optimizer(self) -> bool:
        return self._is_manual or self._optimizer_exists()

    # ------------------------------------------------------------------ optimizers

    @property
    def is_inside_optimizer(self) -> bool:
        """True between the begin and the end of an optimizer step."""
        return self._optimizer_depth > 0

    def optimizer_begins(self) -> bool:
        """Enter an optimizer step; True for the outermost one."""
        self._optimizer_depth += 1
        return self._optimizer_depth == 1

    def optimizer_ends(self) -> bool:
        """Leave an optimizer step; True for the outermost one, which ends the train step."""
        self._optimizer_depth = max(self._optimizer_depth - 1, 0)
        if self._optimizer_depth == 0:
            self.is_ended = self.is_ended or not self._is_manual
            return True
        return False

    def set_optimizer_depth(self, running: int) -> None:
        """Correct the count of optimizer steps that are running: one that raised never ended."""
        self._optimizer_depth = max(min(self._optimizer_depth, running), 0)

    def step(self) -> None:
        """End the train step now (`rankscope.step()`); from here on only this call does."""
        self._is_manual = True
        self.is_ended = True

    # ------------------------------------------------------------------ what is to come

    def expects_next_train(self) -> bool:
        """True where the train step after this one is going to be traced, as far as is known."""
        return self._chosen_steps.expects(self.train + 1)

    def expects_run(self) -> bool:
        """True where a run of a pipeline schedule that begins now may be of a traced step."""
        steps = [self._step_of_next_run(mode) for mode in (Mode.TRAIN, Mode.EVAL)]
        return any(map(self._chosen_steps.expects, steps))

    def run_begins(self, mode: Mode) -> bool:
        """Note what a run of a pipeline schedule is going to be; True where it will be traced."""
        self._mode_of_run = mode
        return self._chosen_steps.expects(self._step_of_next_run(mode))

    def _step_of_next_run(self, mode: Mode) -> int:
        if mode is Mode.EVAL:
            return self.eval + 1
        if self.train < 0 or self.is_ended:
            return self.train + 1
        return self.train + (not self._waits_for_optimizer())

    # ------------------------------------------------------------------ outside module calls

    def step_of_run(self, run: int) -> RunningStep | None:
        """Return the traced step of a collective in a run of a schedule, outside module calls."""
        if run == self._eval_run:
            return self._running_eval()
        mode = self._mode_of_run
        step = self._step_of_next_run(mode)
        if run == self._train_run:
            mode, step = Mode.TRAIN, self.train
        if mode is Mode.TRAIN and step == self.train:
            is_traced = self.traced_train is not None
        else:
            is_traced = self._chosen_steps.expects(step)
        return RunningStep(mode, step, False) if is_traced else None

    def step_of_collective(
        self, *, is_message: bool, is_busy: bool, has_gradients: bool
    ) -> RunningStep | None:
        """Return the traced step of a collective outside every module call. `is_busy`: an optimizer
        step or a backward pass is running.

        A send or receive behind an optimizer step belongs to the next step: a pipeline stage
        receives before its own forward. Other collectives there belong to the step that has ended;
        behind the last traced step they are left alone: ranks wait on checkpoints there.
        """
        if self.is_eval_open and not is_busy:
            return self._running_eval()
        if self.train < 0:
            mode = Mode.TRAIN if self._optimizer_exists() else Mode.EVAL
            step = self.eval + 1 if mode is Mode.EVAL else 0
            return RunningStep(mode, step, False) if self._chosen_steps.expects(step) else None
        if self.is_ended and not is_busy:
            mode = Mode.EVAL if is_message and not has_gradients else Mode.TRAIN
            step = 1 + (self.train if mode is Mode.TRAIN else self.eval)
            if not self._chosen_steps.expects(step):
                return None
            if is_message:
                return RunningStep(mode, step, False)
        if self.traced_train is None:
            return None
        return RunningStep(Mode.TRAIN, self.traced_train, self.is_inside_optimizer)

    def _running_eval(self) -> RunningStep | None:
        return None if self.traced_eval is None else RunningStep(Mode.EVAL, self.traced_eval, False)
