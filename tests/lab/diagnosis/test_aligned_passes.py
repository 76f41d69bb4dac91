"""Ranks whose optimizer steps are cut at other backward passes: what is said, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool

STEPS = 6
LEFT_OUT = {
    "one": {(1, 1)},
    "each": {(1, 1), (0, 3)},
    "with-its-gradients": {(1, 1)},
    "none": set[tuple[int, int]](),
}
"""(rank, iteration) whose optimizer step is left out."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(iteration: int, part: int = 0) -> Tensor:
    seed = 1000 * iteration + 10 * part + dist.get_rank()
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def average(parameters: Iterator[nn.Parameter]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def leaves_out(by: str, way: str, out: str) -> None:
    """Train; some ranks leave out a step, behind a pass that all of them have reduced."""
    rank = dist.get_rank()
    with rankscope.trace(out=out, steps="all"):
        model: nn.Module = net()
        if by == "fsdp":
            fully_shard(model)
        if by == "ddp":
            model = DDP(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for iteration in range(STEPS):
            is_kept = way == "with-its-gradients" and (rank, iteration - 1) in LEFT_OUT[way]
            if not is_kept:
                optimizer.zero_grad()
            model(rows(iteration)).pow(2).mean().backward()
            if by == "hand":
                average(model.parameters())
            if (rank, iteration) not in LEFT_OUT[way]:
                optimizer.step()


@pytest.mark.parametrize("way", ["one", "each", "with-its-gradients"])
@pytest.mark.parametrize("by", ["hand", "ddp", "fsdp"])
def test_a_step_that_one_rank_leaves_out_is_the_fault_and_other_passes_are_not_compared(
    ranks: RankPool, tmp_path: Path, by: str, way: str
) -> None:
    report = report_of(ranks, leaves_out, by, way, folder=tmp_path)
    (first,) = [f for f in report.findings if f.severity is Severity.FAULT]
    assert (first.kind, first.step, first.is_origin) == (Kind.STRUCTURE, 1, True)
    assert "rank 0 took 1 backward pass, rank 1 took 2 backward passes" in first.message
    assert any("values that are of other passes" in note for note in report.notes)
    skipped = {skip.reason: skip.count for skip in report.skipped}
    assert skipped["of other backward passes on some ranks"] > 0


def test_the_rank_that_leaves_it_out_is_named_where_others_tell(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = report_of(ranks, leaves_out, "hand", "one", folder=tmp_path, world=3)
    (first,) = [f for f in report.findings if f.severity is Severity.FAULT]
    assert (first.kind, first.ranks) == (Kind.STRUCTURE, (1,))


@pytest.mark.parametrize("by", ["hand", "ddp", "fsdp"])
def test_the_right_twin_is_clean(ranks: RankPool, tmp_path: Path, by: str) -> None:
    report = report_of(ranks, leaves_out, by, "none", folder=tmp_path)
    assert (report.verdict, report.findings) == (Verdict.CLEAN, ())


def trains(way: str, out: str) -> None:
    """Right programs whose ranks go through unlike numbers of passes, or of steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with rankscope.trace(out=out, steps="all"):
        model = net()
        if way == "unsynchronized shards":
            fully_shard(model, reshard_after_forward=False)
            model.set_reshard_after_backward(False)
        parameters = [*model.parameters()]
        optimizer = torch.optim.SGD(parameters, 0.1)
        for iteration in range(STEPS):
            optimizer.zero_grad()
            parts = 1 + (rank + iteration) % 2
            if way == "taking turns":  # one rank steps, and sends what it made
                model(rows(iteration)).pow(2).mean().backward()
                average(model.parameters())
                if iteration % world == rank:
                    optimizer.step()
                for parameter in parameters:
                    dist.broadcast(parameter.data, iteration % world)
            elif way == "apart":  # unlike numbers of steps and passes, then an average
                for _ in range(2 + rank):
                    optimizer.zero_grad()
                    for part in range(1 + rank):
                        model(rows(iteration, part)).pow(2).mean().backward()
                    optimizer.step()
                for parameter in parameters:
                    dist.all_reduce(parameter.data)
                    parameter.data /= world
            elif way == "joined":  # who has no batch left hands in zeros
                sums = [torch.zeros_like(parameter) for parameter in parameters]
                for part in range(2):
                    optimizer.zero_grad()
                    if part < parts:
                        model(rows(iteration, part)).pow(2).mean().backward()
                    for parameter, total in zip(parameters, sums):
                        own = torch.zeros_like(total) if part >= parts else parameter.grad
                        dist.all_reduce(own)
                        total += own / world
                for parameter, total in zip(parameters, sums):
                    parameter.grad = total
                optimizer.step()
            else:  # each adds up its own number of micro-batches, and all reduce once
                for part in range(parts):
                    if way == "unsynchronized shards":
                        model.set_requires_gradient_sync(part == parts - 1)
                    model(rows(iteration, part)).pow(2).mean().backward()
                if way == "unsynchronized":
                    average(model.parameters())
                optimizer.step()
                if way == "unsynchronized shards":
                    model.reshard()


@pytest.mark.parametrize(
    "way", ["taking turns", "apart", "joined", "unsynchronized", "unsynchronized shards"]
)
def test_right_programs_with_unlike_numbers_of_passes_are_clean(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    report = report_of(ranks, trains, way, folder=tmp_path)
    assert (report.verdict, report.findings) == (Verdict.CLEAN, ())
