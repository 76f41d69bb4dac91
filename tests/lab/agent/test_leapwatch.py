"""Values that the user named, in programs that evaluate, accumulate or lack them."""

from __future__ import annotations

from collections.abc import Callable

from rankscope.record.call import Mode
from tests.agent.test_leapwatch import Watching
from tests.agent.test_leapwatch import watching as watching


def test_micro_batches_make_one_magnitude_of_a_step_however_many_there_are(
    watching: Callable[..., Watching],
):
    rank = watching()
    for step in range(40):
        rank.train(step, *([0.001] * (step % 5)), 1.0, *([0.5] * (step % 3)))
    assert rank.told() == [], "the small ones make no median of their own"
    rank.train(40, 1.0, 1.0, 30.0, 1.0)
    assert [event.step for event in rank.told()] == [40]


def test_eval_steps_beside_train_steps_are_not_watched(watching: Callable[..., Watching]):
    rank = watching()
    for step in range(40):
        rank.train(step, 1.0)
        rank.evaluate(step, 1.0 if step < 20 else 1e6)
    assert rank.told() == []


def test_a_program_that_does_not_train_has_its_eval_steps_watched(
    watching: Callable[..., Watching],
):
    rank = watching()
    for step in range(20):
        rank.evaluate(step, 1.0 if step < 19 else 1e3)
    assert [(event.mode, event.step) for event in rank.told()] == [(Mode.EVAL, 19)]
    for step in range(20):
        rank.train(step, 1e6)
    assert len(rank.told()) == 1, "train steps have a median of their own"


def test_a_scalar_is_named_by_itself(watching: Callable[..., Watching]):
    rank = watching()
    for step in range(20):
        rank.begin(step)
        rank.value(rank.call("loss", step), 40.0 if step == 19 else 1.0, count=1)
    (event,) = rank.told()
    assert event.text == "rank 0: loss:output is 40 in step 19, 40 times its running median 1"


def test_a_rank_without_the_value_has_nothing_to_tell(watching: Callable[..., Watching]):
    """As the last stage of a pipeline has the loss alone."""
    first, second = watching(rank=0), watching(rank=1)
    for step in range(20):
        first.train(step, 1.0 if step < 15 else 1e4, path="other")
        second.train(step, 1.0 if step != 15 else 1e4)
    (event,) = first.told()
    assert event.text.startswith("rank 1: ") and event.step == 15
