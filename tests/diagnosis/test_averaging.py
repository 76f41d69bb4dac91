"""Ranks that train apart and average their parameters, and ranks that forgot a reduction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.record.finding import Report, Verdict
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from tests.diagnosis.paper import collective, event, judged, module, numbers, setup
from tests.tree.ranks_on_paper import PaperRank


def job(folder: Path, summed: str, *, reduced: bool = False, at: int = 1) -> Report:
    """Two local steps; between them the ranks sum what `summed` names, recorded in step `at`. With
    `reduced` one gradient is the same on all ranks."""

    def write(rank: PaperRank) -> None:
        own = 100 * rank.rank
        setup(rank, {"a.weight": numbers(0), "b.weight": numbers(1, 5)})
        for step in range(2):
            with rank.call(class_name="Model", step=step) as top:
                given = numbers(10 + own + step)
                module(rank, "a", given, numbers(20 + own), step=step)
                module(rank, "b", given, numbers(21 + own), step=step)
            left = _left(rank.rank)
            if step == at:
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
    ways = {
        "each": left,
        "flat": [flat],
        "divided": [flat / 2],
        "went": [numbers(0) - left[0], numbers(1, 5) - left[1]],
        "other": [each * each for each in left],
        "scalar": [flat[:1]],
        "none": [],
    }
    return ways[summed]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("summed", ["each", "flat", "divided", "went"])
def test_ranks_that_average_their_parameters_are_no_fault(tmp_path: Path, summed: str, at: int):
    report = job(tmp_path, summed, at=at)
    assert report.verdict is Verdict.CLEAN
    assert f"average their parameters (seen in step {at})" in report.notes[0]


def test_ranks_that_average_something_else_forgot_a_reduction(tmp_path: Path):
    report = job(tmp_path, "other")
    assert {finding.kind.value for finding in report.origins} == {"gradient-not-reduced"}


@pytest.mark.parametrize("summed", ["none", "scalar"])
def test_all_that_differs_on_ranks_that_share_no_numbers_is_one_fault(tmp_path: Path, summed: str):
    """Separate jobs in one world, or a model that nobody wrapped: the trace cannot tell."""
    (finding,) = job(tmp_path, summed).findings
    assert (finding.kind.value, finding.victims) == ("gradient-not-reduced", 7)
    assert "Nothing here goes from rank to rank" in finding.advice


def test_one_gradient_that_is_reduced_says_that_the_others_should_be(tmp_path: Path):
    report = job(tmp_path, "flat", reduced=True)
    assert next((f.kind.value, f.path) for f in report.origins) == ("gradient-not-reduced", "a")


def test_an_outer_optimizer_may_step_between_with_what_was_averaged(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        setup(rank, {"a.weight": numbers(0)})
        left = numbers(40 + rank.rank)
        for step in range(2):
            with rank.call(class_name="Model", step=step) as top:
                module(rank, "a", numbers(10 + rank.rank), numbers(20 + rank.rank), step=step)
            if step:
                total = 2 * numbers(0) - numbers(40) - numbers(41)
                collective(rank, "", 0, numbers(0) - left, total, parent=top, step=step)
            event(rank, Phase.GRADS, "grad", {"a.weight": numbers(30 + rank.rank)}, step=step)
            event(rank, Phase.PARAMS, "param", {"a.weight": left}, step=step)
            if not step:
                event(rank, Phase.GRADS, "grad", {"a.weight": numbers(50)}, step=step)
                event(rank, Phase.PARAMS, "param", {"a.weight": numbers(51)}, step=step)

    assert judged(tmp_path, 2, write).verdict is Verdict.CLEAN


def apart(folder: Path, flags: int) -> Report:
    """Two steps of ranks that never reduce a gradient nor average, each on its own rows; they
    gather what the model gave."""

    def write(rank: PaperRank) -> None:
        own = 100 * rank.rank
        setup(rank, {"a.weight": numbers(0), "b.weight": numbers(1, 5)})
        for step in range(2):
            with rank.call(class_name="Model", step=step) as top:
                module(rank, "a", numbers(10 + own + step), numbers(20 + own), step=step)
                module(rank, "b", numbers(12 + own + step), numbers(21 + own), step=step)
            both = numbers(21) + numbers(121)
            collective(rank, "", 0, numbers(21 + own), both, parent=top, step=step)
            grads = {"a.weight": numbers(30 + own), "b.weight": numbers(31 + own, 5)}
            event(rank, Phase.GRADS, "grad", grads, step=step, flags=flags)
            after = dict(zip(("a.weight", "b.weight"), _left(rank.rank)))
            event(rank, Phase.PARAMS, "param", after, step=step)

    return judged(folder, 2, write)


def test_steps_inside_no_sync_are_one_warning_and_what_follows_is_no_fault(tmp_path: Path):
    """Local SGD of which no traced step holds an average: it may be meant, and is told once."""
    report = apart(tmp_path, int(ValueFlag.NO_SYNC))
    assert report.verdict is Verdict.CLEAN
    (finding,) = report.findings
    assert (finding.kind.value, finding.severity.value) == ("gradient-not-reduced", "warning")
    assert (finding.path, finding.step, finding.ranks) == ("a", 0, (0, 1))
    assert finding.victims == 7, "both gradients and both parameters of two steps"
    assert "--rs-steps" in finding.advice


def test_gradients_that_were_to_be_reduced_stay_a_fault_of_each(tmp_path: Path):
    report = apart(tmp_path, 0)
    assert report.verdict is Verdict.FAULT
    assert {finding.kind.value for finding in report.origins} == {"gradient-not-reduced"}


def averaging(folder: Path, averaged: tuple[str, ...], layout: str = "") -> Report:
    """Two local steps of two modules; between them ranks sum the parameters named."""
    names = ("a.weight", "a.bias", "b.weight", "b.bias")

    def write(rank: PaperRank) -> None:
        own = 100 * rank.rank
        setup(rank, {name: numbers(place) for place, name in enumerate(names)})
        left = {name: numbers(40 + own + place) for place, name in enumerate(names)}
        for step in range(2):
            with rank.call(class_name="Model", step=step) as top:
                module(rank, "a", numbers(10 + own + step), numbers(20 + own), step=step)
                module(rank, "b", numbers(12 + own + step), numbers(22 + own), step=step)
            for number, name in enumerate(averaged if step else ()):
                place = 40 + names.index(name)
                total = numbers(place) + numbers(place + 100)
                collective(rank, "", number, left[name], total, parent=top, step=1, ordinal=number)
            grads = {name: numbers(30 + own + place) for place, name in enumerate(names)}
            event(rank, Phase.GRADS, "grad", grads, step=step)
            event(rank, Phase.PARAMS, "param", left, step=step)

    return judged(folder, 2, write, layout)


def test_a_parameter_that_no_average_holds_beside_others_of_its_module_is_named(tmp_path: Path):
    report = averaging(tmp_path, ("a.weight", "b.weight", "b.bias"))
    first = report.origins[0]
    assert (first.kind.value, first.phase, first.path) == ("replica-mismatch", Phase.PARAMS, "a")
    assert {finding.slot for finding in report.findings} == {"param:bias"}
    assert "and not this one" in first.message


def test_a_head_of_which_nothing_is_averaged_may_be_each_rank_s_own(tmp_path: Path):
    assert averaging(tmp_path, ("a.weight", "a.bias")).verdict is Verdict.CLEAN


def test_what_a_layout_file_calls_each_rank_s_own_is_held_to_no_other_rank(tmp_path: Path):
    entry = '[[layout]]\npath = "a"\nslot = "param:bias"\nown = true\n'
    report = averaging(tmp_path, ("a.weight", "b.weight", "b.bias"), f'axes = "dp=2"\n{entry}')
    assert report.verdict is Verdict.CLEAN and not report.findings
    assert "each rank's own, as declared" in {skip.reason for skip in report.skipped}
