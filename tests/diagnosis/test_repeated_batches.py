"""Rows that come again: in a later step, and on another rank in the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool

Order = Callable[[int, int], torch.Tensor]
"""Rows of a rank in an epoch."""


def drawn(rank: int, epoch: int) -> torch.Tensor:
    sampler = DistributedSampler(range(24), dist.get_world_size(), rank, seed=1)
    sampler.set_epoch(epoch)
    return torch.tensor(list(sampler))


def in_one_order(rank: int, epoch: int) -> torch.Tensor:
    return drawn(rank, 0)


def one_batch(rank: int, epoch: int) -> torch.Tensor:
    return drawn(rank, 0)[:4].repeat(3)


def used_twice(rank: int, epoch: int) -> torch.Tensor:
    return drawn(rank, epoch).repeat(2)


def with_one_row_in_common(rank: int, epoch: int) -> torch.Tensor:
    return torch.arange(4) + 12 * epoch + 3 * rank


def with_two_rows_in_common(rank: int, epoch: int) -> torch.Tensor:
    return torch.arange(4) + 12 * epoch + 2 * rank


def trains(order: Order, out: str) -> None:
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rankscope.trace(model, out=out, steps="all"):
        for epoch in range(2):
            for rows in order(dist.get_rank(), epoch).split(4):
                model(data[rows]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("order", [drawn, one_batch, used_twice, with_one_row_in_common])
def test_other_rows_and_rows_used_again_on_purpose_are_no_warning(
    ranks: RankPool, tmp_path: Path, order: Order
):
    report = report_of(ranks, trains, order, folder=tmp_path)
    assert (report.verdict, list(report.findings)) == (Verdict.CLEAN, [])


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (
            in_one_order,
            "ranks 0-1 had 3 batches, in steps 0 to 2, and the same in the same order again in the "
            "3 traced steps behind them",
        ),
        (
            with_two_rows_in_common,
            "ranks 0-1 are data-parallel (DDP) and share 4 of the 8 rows that they were handed",
        ),
    ],
)
def test_rows_that_come_again_are_counted(ranks: RankPool, tmp_path: Path, order: Order, text: str):
    report = report_of(ranks, trains, order, folder=tmp_path)
    (finding,) = report.findings
    assert (report.verdict, finding.severity) == (Verdict.CLEAN, Severity.WARNING)
    assert (finding.kind, finding.message) == (Kind.DUPLICATE, f"(root):input.0: {text}")
