"""Which step runs, and whether it is traced: the machine alone, without torch."""

from __future__ import annotations

from rankscope.agent.steps.chosen import ChosenSteps
from rankscope.agent.steps.stepmachine import RunningStep, StepMachine, Tick
from rankscope.record.call import Mode
from rankscope.record.stepselection import StepSelection


def machine(*, steps: str = "all", optimizer: bool = True) -> StepMachine:
    """Return a machine before its first step."""
    return StepMachine(ChosenSteps(StepSelection.parse(steps)), lambda: optimizer)


def forward(machine: StepMachine, *, gradients: bool = True, run: int | None = None) -> Tick:
    """Announce one root forward, and begin the step that it may open."""
    tick = machine.root_forward(has_gradients=gradients, run=run)
    if tick.opens_step:
        machine.end_eval()
        if tick.mode is Mode.TRAIN:
            machine.end_train()
        machine.begins(tick.mode, tick.step)
    return tick


def optimizer_steps(machine: StepMachine) -> None:
    """Let an optimizer step."""
    machine.optimizer_begins()
    machine.optimizer_ends()


def test_the_forwards_of_one_run_of_a_schedule_are_one_step_of_their_mode() -> None:
    """Nothing else says so where no optimizer steps, and in evaluation."""
    clock = machine(optimizer=False)
    for gradients in (True, False):
        ticks = [forward(clock, run=run, gradients=gradients) for run in (0, 0, 1, 1)]
        assert [(tick.step, tick.opens_step) for tick in ticks] == [
            (0, True), (0, False), (1, True), (1, False),
        ]  # fmt: skip


def test_a_run_that_begins_goes_on_with_an_accumulated_step() -> None:
    def step_of(clock: StepMachine, mode: Mode) -> RunningStep | None:
        clock.run_begins(mode)
        return clock.step_of_run(7)

    for has_optimizer, goes_on_with in ((True, 0), (False, 1)):
        clock = machine(optimizer=has_optimizer)
        assert step_of(clock, Mode.TRAIN) == (Mode.TRAIN, 0, False)
        forward(clock)
        assert step_of(clock, Mode.TRAIN) == (Mode.TRAIN, goes_on_with, False)
        optimizer_steps(clock)
        assert step_of(clock, Mode.TRAIN) == (Mode.TRAIN, 1, False)
        assert step_of(clock, Mode.EVAL) == (Mode.EVAL, 0, False)


def test_the_first_root_forward_opens_step_zero() -> None:
    assert forward(machine()) == Tick(Mode.TRAIN, 0, True)


def test_accumulated_forwards_stay_in_one_step_until_an_optimizer_has_stepped() -> None:
    clock = machine()
    ticks = [forward(clock) for _ in range(3)]
    assert [(tick.step, tick.opens_step) for tick in ticks] == [(0, True), (0, False), (0, False)]
    optimizer_steps(clock)
    assert forward(clock) == Tick(Mode.TRAIN, 1, True)


def test_several_optimizers_in_a_row_close_one_step_only() -> None:
    clock = machine()
    forward(clock)
    for _ in range(3):
        optimizer_steps(clock)
    assert forward(clock).step == 1


def test_a_nested_optimizer_step_reports_only_its_outermost_part() -> None:
    clock = machine()
    forward(clock)
    assert [clock.optimizer_begins(), clock.optimizer_begins()] == [True, False]
    assert not clock.is_ended
    assert [clock.optimizer_ends(), clock.optimizer_ends()] == [False, True]
    assert clock.is_ended


def test_a_closure_running_forward_inside_the_optimizer_stays_in_its_step() -> None:
    clock = machine()
    forward(clock)
    clock.optimizer_begins()
    assert forward(clock) == Tick(Mode.TRAIN, 0, False)
    clock.optimizer_ends()
    assert forward(clock).step == 1


def test_a_loop_that_runs_every_forward_in_a_closure_has_one_step_per_optimizer_step() -> None:
    clock, steps = machine(), []
    for _ in range(3):
        clock.optimizer_begins()
        steps.append([forward(clock).step for _ in range(4)])
        clock.optimizer_ends()
    assert steps == [[0] * 4, [1] * 4, [2] * 4]


def test_forwards_without_gradients_are_eval_steps_of_their_own_and_close_nothing() -> None:
    clock = machine()
    forward(clock)
    assert [forward(clock, gradients=False).step for _ in range(3)] == [0, 1, 2]
    assert forward(clock) == Tick(Mode.TRAIN, 0, False)


def test_without_any_optimizer_every_root_forward_is_a_step() -> None:
    clock = machine(optimizer=False)
    assert [forward(clock).step for _ in range(3)] == [0, 1, 2]


def test_a_step_closed_by_hand_overrides_the_rule_from_then_on() -> None:
    clock = machine()
    forward(clock)
    clock.step()
    assert forward(clock).step == 1
    optimizer_steps(clock)
    assert forward(clock) == Tick(Mode.TRAIN, 1, False), "only rankscope.step() closes steps now"
    clock.step()
    assert forward(clock).step == 2


def test_an_optimizer_step_that_raised_does_not_swallow_the_next_step() -> None:
    clock = machine()
    forward(clock)
    clock.optimizer_begins()
    clock.set_optimizer_depth(0)
    optimizer_steps(clock)
    assert forward(clock).step == 1


# ---------------------------------------------------------------- which steps are traced


def test_a_step_is_traced_where_the_setting_names_it_in_train_and_in_eval() -> None:
    chosen = ChosenSteps(StepSelection.parse("1"))
    clock, traced = StepMachine(chosen, lambda: True), []
    for _ in range(3):
        forward(clock)
        forward(clock, gradients=False)
        traced.append((clock.traced_train, clock.traced_eval))
        optimizer_steps(clock)
    assert traced == [(None, None), (1, 1), (None, None)]
    assert clock.is_train_over and not chosen.none_traced(clock.train, clock.eval)


def test_an_eval_step_inside_a_traced_train_step_is_open_though_it_is_not_traced() -> None:
    """Hooks are on there: what is called in it must not be taken for a part of the train step."""
    clock = machine(steps="1")
    forward(clock, gradients=False)
    assert not clock.is_eval_open
    forward(clock), optimizer_steps(clock), forward(clock), forward(clock, gradients=False)
    assert clock.is_eval_open and clock.traced_eval == 1
    forward(clock, gradients=False)
    assert clock.is_eval_open and clock.traced_eval is None
    assert outside(clock) is None


def outside(clock: StepMachine, *, message: bool = False, gradients: bool = True) -> object:
    """Return what a collective outside every module call belongs to now."""
    return clock.step_of_collective(
        is_message=message, is_busy=clock.is_inside_optimizer, has_gradients=gradients
    )


def test_a_message_behind_an_optimizer_step_belongs_to_the_next_step_and_no_other_collective() -> (
    None
):
    """A pipeline stage receives what it works on before its own forward."""
    clock = machine()
    assert outside(clock) == (Mode.TRAIN, 0, False)
    forward(clock)
    clock.optimizer_begins()
    assert outside(clock) == (Mode.TRAIN, 0, True)
    clock.optimizer_ends()
    assert outside(clock) == (Mode.TRAIN, 0, False)
    assert outside(clock, message=True) == (Mode.TRAIN, 1, False)
    assert outside(clock, message=True, gradients=False) == (Mode.EVAL, 0, False)


def test_collectives_behind_the_last_traced_step_are_left_alone() -> None:
    """There ranks wait on checkpoints, not on each other."""
    clock = machine(steps="0")
    forward(clock)
    optimizer_steps(clock)
    assert outside(clock) is None and outside(clock, message=True) is None
