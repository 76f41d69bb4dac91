"""A weight that begins unlike on ranks of DDP leaves them data-parallel."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from rankscope.record.finding import Kind
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def trains(out: str) -> None:
    rank = dist.get_rank()
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
        wrapped = DDP(model)
        with torch.no_grad():
            model[2].weight[0, 0] += 0.5 * rank
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for iteration in range(3):
            generator = torch.Generator().manual_seed(10 * iteration + rank)
            optimizer.zero_grad()
            wrapped(torch.randn(4, 6, generator=generator)).pow(2).mean().backward()
            optimizer.step()


def test_activations_of_the_others_rows_are_not_said_to_lie_in_an_unknown_layout(
    ranks: RankPool, tmp_path: Path
) -> None:
    report = report_of(ranks, trains, folder=tmp_path)
    assert [(f.kind, f.path) for f in report.origins] == [(Kind.REPLICA, "2")]
    skipped = {skip.reason: skip.count for skip in report.skipped}
    # the weight itself alone: no layout makes one of what began unlike
    assert skipped["layout unknown"] < 0.2 * skipped["these ranks have rows of their own"]
