"""Which magnitudes leap: those of a run that diverges, and of no right program."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from rankscope.agent.blackboxwatch import RunningMedian


def leaps(magnitudes: Iterable[float], factor: float = 10.0) -> list[int]:
    """The steps at which a magnitude is beyond the limit that the steps before make."""
    known, found = RunningMedian(factor), []
    for step, magnitude in enumerate(magnitudes):
        if magnitude > known.limit:
            found.append(step)
        known.add(magnitude)
    return found


def noisy(steps: int) -> list[float]:
    chance = random.Random(steps)
    return [math.exp(chance.gauss(0.0, 0.4)) for _ in range(steps)]


@pytest.mark.parametrize("at", [8, 9, 20, 31, 32, 33, 300])
def test_a_step_far_beyond_the_median_leaps(at: int):
    assert leaps([*noisy(at), 60.0, *noisy(50)]) == [at]


def test_nothing_leaps_before_eight_steps_are_known():
    assert leaps([1e-9, 1.0, 1e3, 1e-3, 1e6, 1.0, 1e4, 1e9]) == []
    known = RunningMedian(10.0)
    for _ in range(7):
        known.add(1.0)
        assert known.limit == math.inf
    known.add(1.0)
    assert known.limit == 10.0


def test_the_factor_is_the_users():
    assert leaps([*[1.0] * 40, 1.6], factor=1.5) == [40]
    assert leaps([*[1.0] * 40, 1.4], factor=1.5) == []
    assert leaps([*[1.0] * 40, 60.0], factor=100.0) == []


def test_a_run_that_diverges_over_some_steps_leaps():
    for growth in (1.6, 2.0, 3.0):
        found = leaps([*noisy(60), *(growth**step for step in range(1, 12))])
        assert found and growth ** (found[0] - 59) < 200


@pytest.mark.parametrize("period", [2, 3, 8, 10, 16, 24])
def test_steps_of_another_kind_do_not_leap_again_and_again(period: int):
    """A second data set, a penalty that not every step has: at most its first one leaps."""
    chance = random.Random(period)
    kinds = [
        (500.0 if step % period == period - 1 else 1.0) * math.exp(chance.gauss(0.0, 0.3))
        for step in range(600)
    ]
    assert len(leaps(kinds)) <= (period > 7), "its first one, where it comes after 8 steps"
    mostly_nothing = [step % period == 0 for step in range(600)]
    assert leaps(map(float, mostly_nothing)) == []


def test_what_goes_down_to_nothing_and_trembles_there_does_not_leap():
    chance = random.Random(0)
    falling = [
        math.exp(-step / 10.0) + 1e-9 * abs(chance.gauss(0.0, 1.0)) ** 3 for step in range(2000)
    ]
    assert leaps(falling) == []
    assert leaps([*falling, 0.5]) == [2000], "what it was in the beginning"
    assert leaps([0.0] * 50 + [1.0]) == [], "0 has no multiples"
    signs = [abs(chance.gauss(0.0, 1.0)) for _ in range(5000)]
    assert leaps(signs) == [], "a loss that changes its sign"
