"""Exact mode: which values of two runs are bitwise equal, and which is the first that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope
from rankscope.errors import SettingError
from rankscope.record.phases import Phase
from tests.distributed import global_tensors_job as job
from tests.distributed.pool import RankPool

SIZES = {"ddp": 2, "ddp drifting": 2, "fsdp x tp": 4}


@pytest.fixture(scope="module")
def traced(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The trace of a kind of parallelism, of today's or of yesterday's run."""
    found: dict[tuple[str, str], Path] = {}

    def of(kind: str, day: str = "today") -> Path:
        if (kind, day) not in found:
            found[kind, day] = tmp_path_factory.mktemp("jobs") / "trace"
            ranks.run(job.run, kind, str(found[kind, day]), "", world_size=SIZES[kind])
        return found[kind, day]

    return of


@pytest.mark.parametrize("kind", ["ddp", "fsdp x tp"])
def test_the_same_job_twice_is_equal_rank_by_rank_shards_too(
    traced: Callable[..., Path], kind: str
) -> None:
    report = rankscope.diff(traced(kind), traced(kind, "yesterday"), exact=True)
    assert (report.verdict.value, report.findings, report.skipped) == ("clean", (), ())
    assert report.equal is not None
    assert [*report.equal] == [p for p in Phase if p in report.equal]
    assert all(equal == total for equal, total in report.equal.values())
    assert sum(total for _, total in report.equal.values()) == report.compared
    assert report.compared == report.recorded > 30


def test_the_first_value_that_differs_is_named_with_ranks_phase_and_step(
    traced: Callable[..., Path],
) -> None:
    report = rankscope.diff(traced("ddp"), traced("ddp drifting"), exact=True)
    (first,) = report.findings
    assert report.equal is not None
    assert report.verdict.value == "fault"
    assert (first.phase, first.step, first.ranks, first.slot[:6]) == (
        Phase.PARAMS,
        0,
        (1,),
        "param:",
    )
    assert first.message.endswith("not bitwise the reference's; equal on rank 0")
    assert report.equal[Phase.FORWARD][0] == report.equal[Phase.FORWARD][1] > 0
    equal = sum(own for own, _ in report.equal.values())
    assert equal + 1 + first.victims == report.compared
    assert 0 < first.evidence["equal_before"] <= equal


def one_process(out: Path, change: Callable[[nn.Module], None] = lambda model: None) -> Path:
    model = job.net()
    change(model)
    with rankscope.trace(out=out):
        job.train(model, job.batch())
    return out


def test_of_other_topologies_only_values_that_ranks_hold_whole_are_compared(
    traced: Callable[..., Path], tmp_path: Path
) -> None:
    alone = one_process(tmp_path / "alone")
    report = rankscope.diff(alone, traced("ddp"), exact=True)
    assert report.equal is not None
    assert report.equal[Phase.SETUP] == (7, 7)
    assert Phase.FORWARD not in report.equal
    assert {s.reason for s in report.skipped} == {
        "of other batches: the runs split them in another way"
    }
    split = rankscope.diff(alone, traced("fsdp x tp"), exact=True)
    assert "spread over ranks in another way: a hash is that of one piece" in {
        s.reason for s in split.skipped
    }


def test_a_last_bit_is_found_where_it_begins_though_diff_calls_it_rounding(tmp_path: Path) -> None:
    alone = one_process(tmp_path / "alone")

    def touched(model: nn.Module) -> None:
        def one_bit_up(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
            bare = made.detach()  # nextafter has no derivative in torch 2.8
            return made + (torch.nextafter(bare, bare + 1) - bare)

        model.down.register_forward_hook(one_bit_up)

    (first,) = rankscope.diff(
        alone, one_process(tmp_path / "touched", touched), exact=True
    ).findings
    assert (first.path, first.slot) == ("down", "returned")
    assert rankscope.diff(alone, tmp_path / "touched").verdict.value == "clean"


def test_another_dtype_is_not_compared_and_no_clean_verdict(tmp_path: Path) -> None:
    alone = one_process(tmp_path / "alone")
    model = job.net().double()
    with rankscope.trace(out=tmp_path / "double"):
        job.train(model, job.batch().double())
    report = rankscope.diff(alone, tmp_path / "double", exact=True)
    assert report.verdict.value == "incomplete"
    assert "of another dtype (float32 and float64)" in report.lacks


def test_noise_is_refused_beside_hashes(tmp_path: Path) -> None:
    alone = one_process(tmp_path / "alone")
    with pytest.raises(SettingError, match="give one of both"):
        rankscope.diff(alone, alone, exact=True, noise=alone)


def test_without_a_step_in_common_equal_weights_are_no_clean_verdict(tmp_path: Path) -> None:
    for step in "01":
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with rankscope.trace(model, out=tmp_path / step, steps=step):
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    report = rankscope.diff(tmp_path / "0", tmp_path / "1", exact=True)
    assert report.verdict.value == "incomplete"
    assert report.lacks.startswith("the traces have no step in common (train 0 and train 1)")
