"""When steps begin: the pure rule, without torch."""

from __future__ import annotations

from rankscope.agent.steps.stepclock import StepClock, Tick
from rankscope.record.call import Mode


def forward(clock: StepClock, *, gradients: bool = True, optimizer: bool = True) -> Tick:
    """Announce one root forward."""
    return clock.root_forward(has_gradients=gradients, optimizer_exists=lambda: optimizer)


def test_the_forwards_of_one_run_of_a_schedule_are_one_step_of_their_mode() -> None:
    """Nothing else says so where no optimizer steps, and in evaluation."""
    clock = StepClock()

    def part(run: int, *, gradients: bool) -> Tick:
        return clock.root_forward(has_gradients=gradients, optimizer_exists=lambda: False, run=run)

    for gradients in (True, False):
        ticks = [part(run, gradients=gradients) for run in (0, 0, 1, 1)]
        assert [(tick.step, tick.opened) for tick in ticks] == [
            (0, True), (0, False), (1, True), (1, False),
        ]  # fmt: skip


def test_a_run_that_begins_goes_on_with_an_accumulated_step() -> None:
    clock = StepClock()
    assert clock.step_of_next_run(Mode.TRAIN, lambda: True) == 0
    forward(clock)
    assert clock.step_of_next_run(Mode.TRAIN, lambda: True) == 0
    assert clock.step_of_next_run(Mode.TRAIN, lambda: False) == 1
    clock.optimizer_begins()
    clock.optimizer_ends()
    assert clock.step_of_next_run(Mode.TRAIN, lambda: True) == 1
    assert clock.step_of_next_run(Mode.EVAL, lambda: True) == 0


def test_the_first_root_forward_opens_step_zero() -> None:
    assert forward(StepClock()) == Tick(Mode.TRAIN, 0, True)


def test_accumulated_forwards_stay_in_one_step_until_an_optimizer_has_stepped() -> None:
    clock = StepClock()
    ticks = [forward(clock) for _ in range(3)]
    assert [t.step for t in ticks] == [0, 0, 0] and [t.opened for t in ticks] == [
        True,
        False,
        False,
    ]
    clock.optimizer_begins()
    clock.optimizer_ends()
    assert forward(clock) == Tick(Mode.TRAIN, 1, True)


def test_several_optimizers_in_a_row_close_one_step_only() -> None:
    clock = StepClock()
    forward(clock)
    for _ in range(3):
        clock.optimizer_begins()
        clock.optimizer_ends()
    assert forward(clock).step == 1


def test_a_nested_optimizer_step_reports_only_its_outermost_part() -> None:
    clock = StepClock()
    forward(clock)
    assert [clock.optimizer_begins(), clock.optimizer_begins()] == [True, False]
    assert not clock.is_ended
    assert [clock.optimizer_ends(), clock.optimizer_ends()] == [False, True]
    assert clock.is_ended


def test_a_closure_running_forward_inside_the_optimizer_stays_in_its_step() -> None:
    clock = StepClock()
    forward(clock)
    clock.optimizer_begins()
    assert forward(clock) == Tick(Mode.TRAIN, 0, False)
    clock.optimizer_ends()
    assert forward(clock).step == 1


def test_a_loop_that_runs_every_forward_in_a_closure_has_one_step_per_optimizer_step() -> None:
    clock, steps = StepClock(), []
    for _ in range(3):
        clock.optimizer_begins()
        steps.append([forward(clock).step for _ in range(4)])
        clock.optimizer_ends()
    assert steps == [[0] * 4, [1] * 4, [2] * 4]


def test_forwards_without_gradients_are_eval_steps_of_their_own_and_close_nothing() -> None:
    clock = StepClock()
    forward(clock)
    assert [forward(clock, gradients=False).step for _ in range(3)] == [0, 1, 2]
    assert forward(clock) == Tick(Mode.TRAIN, 0, False)


def test_without_any_optimizer_every_root_forward_is_a_step() -> None:
    clock = StepClock()
    assert [forward(clock, optimizer=False).step for _ in range(3)] == [0, 1, 2]


def test_a_step_closed_by_hand_overrides_the_rule_from_then_on() -> None:
    clock = StepClock()
    forward(clock)
    clock.step()
    assert forward(clock).step == 1
    clock.optimizer_begins()
    clock.optimizer_ends()
    assert forward(clock) == Tick(Mode.TRAIN, 1, False), "only rankscope.step() closes steps now"
    clock.step()
    assert forward(clock).step == 2


def test_an_optimizer_step_that_raised_does_not_swallow_the_next_step() -> None:
    clock = StepClock()
    forward(clock)
    clock.optimizer_begins()
    clock.set_optimizer_depth(0)
    clock.optimizer_begins()
    clock.optimizer_ends()
    assert forward(clock).step == 1
