"""Ranks that train apart and average their parameters, and ranks that forgot a reduction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.record.call import Phase
from rankscope.record.finding import Report, Verdict
from tests.judge.paper import collective, event, judged, module, numbers, setup
from tests.tree.ranks_on_paper import PaperRank


def job(folder: Path, summed: str, *, reduced: bool = False) -> Report:
    """Two local steps; between them the ranks sum what `summed` names. With `reduced` one gradient
    is the same on all ranks."""

    def write(rank: PaperRank) -> None:
        own = 100 * rank.rank
        setup(rank, {"a.weight": numbers(0), "b.weight": numbers(1, 5)})
        for step in range(2):
            with rank.call(class_name="Model", step=step) as top:
                given = numbers(10 + own + step)
                module(rank, "a", given, numbers(20 + own), step=step)
                module(rank, "b", given, numbers(21 + own), step=step)
            left = _left(rank.rank)
            if step:
                pairs = zip(_given(summed, left), _summed(summed), strict=True)
                for number, (value, total) in enumerate(pairs):
                    collective(
                        rank, "", number, value, total, parent=top, step=step, ordinal=number
                    )
            grads = {"a.weight": numbers(30 + own), "b.weight": numbers(31 + own * (not reduced))}
            event(rank, Phase.GRADS, "grad", grads, step=step)
            after = dict(zip(("a.weight", "b.weight"), left))
            event(rank, Phase.PARAMS, "param", after, step=step)

    return judged(folder, 2, write)


def _left(rank: int) -> list[np.ndarray]:
    """What a rank's parameters are after a step."""
    return [numbers(40 + 100 * rank), numbers(41 + 100 * rank, 5)]


def _summed(way: str) -> list[np.ndarray]:
    both = zip(_given(way, _left(0)), _given(way, _left(1)), strict=True)
    return [one + other for one, other in both]


def _given(summed: str, left: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate([each.reshape(-1) for each in left])
    ways = {"each": left, "flat": [flat], "divided": [flat / 2], "scalar": [flat[:1]], "none": []}
    return ways[summed]


@pytest.mark.parametrize("summed", ["each", "flat", "divided"])
def test_ranks_that_average_their_parameters_are_no_fault(tmp_path: Path, summed: str):
    report = job(tmp_path, summed)
    assert report.verdict is Verdict.CLEAN
    assert "average their parameters (seen in step 1)" in report.notes[0]


@pytest.mark.parametrize("summed", ["none", "scalar"])
def test_ranks_that_average_nothing_forgot_a_reduction(tmp_path: Path, summed: str):
    report = job(tmp_path, summed)
    assert {finding.kind.value for finding in report.origins} == {"gradient-not-reduced"}


def test_one_gradient_that_is_reduced_says_that_the_others_should_be(tmp_path: Path):
    report = job(tmp_path, "flat", reduced=True)
    assert next((f.kind.value, f.path) for f in report.origins) == ("gradient-not-reduced", "a")
