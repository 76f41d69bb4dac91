"""The proofs themselves: every fault is real, and every program without it is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.lab.faults.rows import BY_NAME, ROWS
from tests.lab.faults.runs import HANG, Run, every_run, proved
from tests.lab.faults.setup import Setup, Shape
from tests.torches import GLOO_SUMS_FOR_AVERAGES

QUICK = (
    "ddp-bypassed",
    "clipping-on-one-rank",
    "router-seed",
    "row-reduce-by-hand",
    "collectives-swapped",
    "stale-pipeline-buffer",
    "optimizer-too-early",
)
"""One of each kind of program: what the default run of the tests proves."""


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_proved_on_and_disproved_off(ranks: RankPool, tmp_path: Path, name: str) -> None:
    faulty = Setup(ranks=BY_NAME[name].ranks[0], is_faulty=True)
    assert proved(ranks, Run(name=name, setup=faulty), tmp_path / "on")
    right = Setup(ranks=BY_NAME[name].ranks[0])
    is_wrong_in_torch = GLOO_SUMS_FOR_AVERAGES and name == "optimizer-too-early"  # of FSDP2
    assert bool(proved(ranks, Run(name=name, setup=right), tmp_path / "off")) == is_wrong_in_torch


@pytest.mark.soak
@pytest.mark.parametrize("name", [*(row.name for row in ROWS), HANG])
def test_every_fault_is_proved_in_every_setup(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for number, run in enumerate(every_run(shape=Shape(layers=3, hidden=24), seeds=2, only=[name])):
        said = proved(ranks, run, tmp_path / str(number))
        assert bool(said) == run.setup.is_faulty, f"{run.label}: {said}"
