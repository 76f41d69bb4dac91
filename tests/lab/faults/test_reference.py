"""`diff` held to the benchmark beside runs of one process: a few rows by default, all as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.lab.faults.__main__ import REFERENCE
from tests.lab.faults.board import is_perfect
from tests.lab.faults.referencerows import BY_NAME, ROWS
from tests.lab.faults.runs import Run, every_run, proved, scored
from tests.lab.faults.setup import Setup, Shape

QUICK = (
    "transposed-weight",
    "head-split",
    "tie-lost",
    "wrong-eps-renamed",
    "averaged-reduction",
    "loss-times-ranks",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs, so that what they are held to is traced once."""
    return tmp_path_factory.mktemp("reference")


@pytest.mark.parametrize("is_faulty", [True, False], ids=["faulty", "off"])
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_named_beside_one_process_and_the_program_without_it_left_alone(
    ranks: RankPool, folder: Path, name: str, is_faulty: bool
) -> None:
    setup = Setup(ranks=BY_NAME[name].ranks[0], is_faulty=is_faulty)
    run = Run(name=name, setup=setup, table=REFERENCE)
    outcome = scored(ranks, run, folder / f"{name}-{is_faulty}", proves=True)
    assert is_perfect(outcome), f"{outcome.run.label}: {outcome.score.said}"
    assert bool(outcome.proof) == is_faulty, f"{outcome.run.label}: {outcome.proof}"


@pytest.mark.soak
@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_every_fault_is_proved_and_named_in_every_setup(
    ranks: RankPool, folder: Path, name: str
) -> None:
    asked = {"shape": Shape(layers=3, hidden=24), "seeds": 2, "only": [name], "table": REFERENCE}
    for number, run in enumerate(every_run(**asked)):
        said = proved(ranks, run, folder)
        assert bool(said) == run.setup.is_faulty, f"{run.label}: {said}"
        outcome = scored(ranks, run, folder / f"{name}-{number}")
        assert is_perfect(outcome), f"{outcome.run.label}: {outcome.score.said}"
