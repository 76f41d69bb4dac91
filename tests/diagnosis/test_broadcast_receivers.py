"""What the receiving side of a broadcast held before it is nobody's value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.finding import Kind
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool
from tests.models import OffsetOfRankZero


def trains(way: str, out: str) -> None:
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = nn.Sequential(OffsetOfRankZero(way), nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            rows = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=rows)).pow(2).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()


@pytest.mark.parametrize(("way", "named"), [("filled", ()), ("empty", (0,))])
def test_only_what_the_source_of_a_broadcast_held_counts(
    ranks: RankPool, tmp_path: Path, way: str, named: tuple[int, ...]
) -> None:
    report = report_of(ranks, trains, way, folder=tmp_path)
    first = {finding.kind: finding.ranks for finding in report.findings[:1]}
    assert first == ({Kind.NONFINITE: named} if named else {})
