"""Modules that gather parts over their ranks, and hand out what follows from the gather alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankscope
from rankscope.record.finding import Kind, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


class Whole(nn.Module):
    """Makes whole numbers of a part, gathers them, and makes numbers of them again."""

    largest: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank()
        self.largest.copy_(x.detach().abs().max())
        if self._way in ("shared", "turned"):
            dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        step = self.largest.clone() / 31
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, (x.detach() / step).round())
        if self._way == "turned":  # its own part first
            parts = parts[rank:] + parts[:rank]
        if self._way == "weighed":  # each rank's own part counts more
            parts[rank] = parts[rank] * 2
        return torch.cat(parts) * step + 0.0 * x.sum()


class Net(nn.Module):
    """A gather in the middle of what each rank computes of its own rows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter, self.whole, self.leave = nn.Linear(6, 8), Whole(way), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x) + self.whole(self.enter(x)).mean(0))


def trains(way: str, out: str) -> None:
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = Net(way)
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
    assert (first.path, first.slot, first.ranks) == ("whole", "output", (0, 1))
    assert "buffer:largest" in first.message
