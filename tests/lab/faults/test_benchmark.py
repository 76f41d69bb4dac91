"""rankscope held to the benchmark: a few rows by default, all of them as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.lab.faults.board import is_perfect
from tests.lab.faults.rows import BY_NAME, ROWS
from tests.lab.faults.runs import HANG, Run, every_run, scored
from tests.lab.faults.setup import Setup, Shape

QUICK = ("ddp-bypassed", "row-reduce-by-hand", "router-seed-dtensor", "infinity")


@pytest.mark.parametrize("is_faulty", [True, False], ids=["faulty", "off"])
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_named_and_the_program_without_it_left_alone(
    ranks: RankPool, tmp_path: Path, name: str, is_faulty: bool
) -> None:
    setup = Setup(ranks=BY_NAME[name].ranks[0], is_faulty=is_faulty)
    outcome = scored(ranks, Run(name=name, setup=setup), tmp_path / "run")
    assert is_perfect(outcome), f"{outcome.run.label}: {outcome.score.said}"


@pytest.mark.soak
@pytest.mark.parametrize("name", [*(row.name for row in ROWS), HANG])
def test_every_fault_is_named_in_every_setup(ranks: RankPool, tmp_path: Path, name: str) -> None:
    runs = every_run(shape=Shape(layers=3, hidden=24), seeds=2, only=[name])
    for number, run in enumerate(runs):
        outcome = scored(ranks, run, tmp_path / str(number))
        assert is_perfect(outcome), f"{outcome.run.label}: {outcome.score.said}"
