"""Gradients that an optimizer reduces inside its own step, and those that nobody reduces."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.record.finding import Report, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.paper import event, judged, module, numbers, origins, setup
from tests.tree.ranks_on_paper import PaperRank

AT_LOAD = {"a.weight": 0, "b.weight": 1}


def job(folder: Path, *after: dict[str, int], reduced: str = "") -> Report:
    """Steps in which gradients are those of each rank's own data, but for that of `reduced`;
    `after` says for each step from which numbers its parameters are, below 0 on each rank others.
    """

    def write(rank: PaperRank) -> None:
        setup(rank, {name: numbers(seed) for name, seed in AT_LOAD.items()})
        for step, made in enumerate(after):
            own = 100 * (1 + rank.rank) + step
            with rank.call(class_name="Model", step=step):
                for place, path in enumerate("ab"):
                    module(rank, path, numbers(10 + own), numbers(20 + own + place), step=step)
            grads = {
                name: numbers(30 + place + (0 if name == reduced else own))
                for place, name in enumerate(made)
            }
            event(rank, Phase.GRADS, "grad", grads, step=step)
            held = {name: numbers(s if s >= 0 else own - s) for name, s in made.items()}
            event(rank, Phase.PARAMS, "param", held, step=step)

    return judged(folder, 2, write)


def test_gradients_reduced_inside_the_optimizers_step_are_no_fault(tmp_path: Path):
    report = job(tmp_path, {"a.weight": 40, "b.weight": 41}, {"a.weight": 42, "b.weight": 43})
    assert report.verdict is Verdict.CLEAN
    assert "reduced inside the step" in report.notes[0]


def test_parameters_that_are_handed_round_behind_the_step_are_seen_one_step_later(tmp_path: Path):
    moved = {"a.weight": 42, "b.weight": 43}
    report = job(tmp_path, AT_LOAD, moved, {"a.weight": 44, "b.weight": 45}, moved)
    assert report.verdict is Verdict.CLEAN, "behind the last step nothing is handed round"


@pytest.mark.parametrize(
    ("after", "reduced", "named"),
    [
        ({"a.weight": 40, "b.weight": -41}, "", ["b"]),
        ({"a.weight": -40, "b.weight": -41}, "", ["a"]),  # nothing is shared at all: one event
        (AT_LOAD, "", ["a"]),
        ({"a.weight": 40, "b.weight": 41}, "a.weight", ["b"]),
    ],
    ids=["one forgotten", "all forgotten", "nothing moved", "the other was reduced before"],
)
def test_a_gradient_that_nobody_reduced_is_named(
    tmp_path: Path, after: dict[str, int], reduced: str, named: list[str]
):
    report = job(tmp_path, after, reduced=reduced)
    assert [(f[0], f[2]) for f in origins(report)] == [("gradient-not-reduced", n) for n in named]
