"""Ranks of one DDP model that step after unlike numbers of backward passes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.record.finding import Kind, Report, Verdict
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from tests.diagnosis.paper import PaperRank, judged, module, numbers, setup
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool

LEFT_OUT = {"alone": ((0, 0), (1, 2)), "together": ((0, 1), (1, 1)), "unsynchronized": ()}
"""(rank, iteration) whose optimizer step is left out."""


def batch(iteration: int, part: int = 0) -> Tensor:
    seed = 100 * iteration + 10 * part + dist.get_rank()
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def trains(way: str, out: str) -> None:
    """Leave steps out on one rank after the other, on all ranks together, or have ranks add up
    unlike numbers of micro-batches before they reduce."""
    rank = dist.get_rank()
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for iteration in range(4):
            optimizer.zero_grad()
            parts = 2 + rank if way == "unsynchronized" else 1
            for part in range(parts):
                is_last = part == parts - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    model(batch(iteration, part)).pow(2).mean().backward()
            if (rank, iteration) not in LEFT_OUT[way]:
                optimizer.step()


@pytest.mark.parametrize("way", ["together", "unsynchronized"])
def test_ranks_that_reduce_together_are_left_alone(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    report = report_of(ranks, trains, way, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert [f for f in report.findings if f.kind is not Kind.SCALE] == []  # measured or left out


def test_a_step_that_one_rank_leaves_out_comes_before_any_number(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = report_of(ranks, trains, "alone", folder=tmp_path)
    first = report.origins[0]
    assert (first.kind, first.step, first.ranks) == (Kind.STRUCTURE, 0, (0, 1))
    assert "rank 1 took 1 backward pass, rank 0 took 2 backward passes" in first.message
    assert [f.kind for f in report.origins] == [Kind.STRUCTURE]


def ended_in_backward(folder: Path, *, has_left_out: bool) -> Report:
    """Two ranks that were killed, rank 0 in a backward. Rank 1 is in the forward of that pass, or
    has left a backward out before."""

    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": numbers(0)}, wrappers=["DDP"])
        how = {"class_name": "Model", "wrappers": ["DDP"]}
        for micro in range(2):
            with rank.call(micro_batch=micro, **how) as top:
                rank.value(top, "output", numbers(9 + micro), requires_grad=True)
            if rank.rank == 0 or (micro == 0 and not has_left_out):
                where = {"micro_batch": micro, "phase": Phase.BACKWARD}
                with rank.call(**where, **how) as top:
                    module(rank, "fc", numbers(1), numbers(2), parent=top, **where)

    return judged(folder, 2, write, ends=dict.fromkeys(range(2), EndReason.LOST))


@pytest.mark.parametrize("has_left_out", [False, True])
def test_a_rank_that_was_killed_on_its_way_to_a_pass_is_not_missing_in_it(
    tmp_path: Path, has_left_out: bool
) -> None:
    report = ended_in_backward(tmp_path, has_left_out=has_left_out)
    hangs = [finding.ranks for finding in report.findings if finding.kind is Kind.HANG]
    assert hangs == ([(1,)] if has_left_out else [])


def finds_its_scale(way: str, out: str) -> None:
    """Scale the loss so that the first pass overflows. All ranks leave the step out, or one takes
    what overflowed."""
    rank = dist.get_rank()
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scale = 2.0**130
        for iteration in range(3):
            optimizer.zero_grad()
            (model(batch(iteration)).pow(2).mean() * scale).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size() * scale
            if iteration or (way == "taken" and rank == 1):
                optimizer.step()
            scale = 2.0**8


@pytest.mark.parametrize(("way", "kinds"), [("left-out", set()), ("taken", {Kind.NONFINITE})])
def test_a_pass_that_overflowed_and_was_thrown_away_is_no_fault(
    ranks: RankPool, tmp_path: Path, way: str, kinds: set[Kind]
) -> None:
    report = report_of(ranks, finds_its_scale, way, folder=tmp_path)
    assert {finding.kind for finding in report.origins} >= kinds
    assert bool(report.origins) is bool(kinds)
