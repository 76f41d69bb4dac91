"""`check` held to bugs that people had: every proof, every right twin, and every answer it gives.

A bug that it does not name yet is an expected failure with its reason. When it is named one day,
the test says so, and its reason goes from the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.lab.faults.board import is_perfect
from tests.lab.faults.runs import Outcome, Run, proved, scored
from tests.lab.faults.setup import Setup, Shape
from tests.lab.real.rows import ROWS, Bug
from tests.torches import REFUSES_OUTER_AXES

TABLE = "tests.lab.real.rows"


def run_of(row: Bug, *, is_faulty: bool) -> Run:
    if not row.is_installed:
        pytest.skip(f"needs {row.package}")
    if is_faulty and REFUSES_OUTER_AXES and row.name.startswith("other-mesh"):
        pytest.skip("torch 2.8 refuses this mistake: tensor parallelism over an outer axis")
    setup = Setup(shape=Shape(layers=3, hidden=24), ranks=row.ranks[0], is_faulty=is_faulty)
    return Run(name=row.name, setup=setup, table=TABLE)


def marked(why: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.xfail(strict=True, reason=why),) if why else ()


def rows(reason: str) -> list[object]:
    """All rows, expected to fail where the field `reason` says why."""
    return [pytest.param(row, marks=marked(getattr(row, reason)), id=row.name) for row in ROWS]


@pytest.fixture(scope="module")
def twin(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Bug], Outcome]:
    """What the oracle and `check` say of one traced run of the right twin of a bug."""

    @functools.cache
    def outcome_of(row: Bug) -> Outcome:
        folder = tmp_path_factory.mktemp("twin") / "run"
        return scored(ranks, run_of(row, is_faulty=False), folder, proves=True)

    return outcome_of


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_bug_is_proved_without_rankscope_and_its_twin_is_right(
    ranks: RankPool, tmp_path: Path, row: Bug, twin: Callable[[Bug], Outcome]
) -> None:
    assert proved(ranks, run_of(row, is_faulty=True), tmp_path / "on")
    outcome = twin(row)
    assert outcome.proof == "", outcome.score.said


@pytest.mark.parametrize("row", rows("missed"))
def test_a_bug_is_named_with_its_module_its_ranks_and_its_kind(
    ranks: RankPool, tmp_path: Path, row: Bug
) -> None:
    outcome = scored(ranks, run_of(row, is_faulty=True), tmp_path / "run")
    assert is_perfect(outcome), f"{outcome.run.label}: {outcome.score.said}"


@pytest.mark.parametrize("row", rows("alarm"))
def test_its_right_twin_is_left_alone(row: Bug, twin: Callable[[Bug], Outcome]) -> None:
    outcome = twin(row)
    assert is_perfect(outcome), f"{outcome.run.label}: {outcome.score.said}"
