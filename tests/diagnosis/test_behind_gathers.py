"""Modules that gather parts over their ranks, and hand out what follows from the gather alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.finding import Kind, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool
from tests.models import Requantized


def trains(way: str, out: str) -> None:
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), Requantized(way), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=seed)).pow(2).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()


@pytest.mark.parametrize("way", ["shared", "turned", "weighed"])
def test_what_ranks_do_to_gathered_parts_is_their_own(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    report = report_of(ranks, trains, way, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN, report.origins


def test_a_scale_of_each_rank_behind_a_gather_is_named(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, trains, "own", folder=tmp_path)
    first = report.origins[0]
    assert (first.kind, first.phase, first.step) == (Kind.REPLICA, Phase.FORWARD, 0)
    assert (first.path, first.slot, first.ranks) == ("1", "output", (0, 1))
    assert "buffer:largest" in first.message
