"""A rank that most of its replicas outvote, a gradient that goes to another rank, ranks that share
nothing; and the right programs beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


class Limited(nn.Module):
    """Scales by the largest element on all ranks, and keeps it in a buffer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.first, self.drops, self.way = nn.Linear(6, 6), nn.Dropout(0.5), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.drops(self.first(x))
        if torch.is_grad_enabled():
            own = x.detach().abs().max()
            largest = own.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            self.largest.copy_(own if self.way == "buffer" and dist.get_rank() == 1 else largest)
        return x / self.largest


def trains(way: str, out: str) -> None:
    """Replicas that average by hand and evaluate on the same rows, unless they share nothing."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(6, 6) if way == "sweep" else nn.parallel.DistributedDataParallel(Limited(way))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank * (way == "sweep")))
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(2):
            torch.manual_seed(step if way == "sweep" else 10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            model.train(way == "mode" and rank == 1)
            with torch.no_grad():
                model(torch.ones(4, 6)) if way != "sweep" else None
            model.train()


@pytest.mark.parametrize(
    ("way", "phase", "place"),
    [
        ("buffer", Phase.PARAMS, ("", "buffer:largest")),
        ("mode", Phase.FORWARD, ("drops", "output")),
    ],
)
def test_a_rank_that_most_replicas_outvote_is_named(
    ranks: RankPool, tmp_path: Path, way: str, phase: Phase, place: tuple[str, str]
) -> None:
    first = report_of(ranks, trains, way, folder=tmp_path, world=3).origins[0]
    assert (first.kind, first.phase, first.ranks) == (Kind.REPLICA, phase, (1,))
    assert (first.path, first.slot) == place


@pytest.mark.parametrize("way", ["right", "sweep"])
def test_replicas_that_agree_and_trials_that_share_nothing_are_right(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    report = report_of(ranks, trains, way, folder=tmp_path, world=3)
    assert report.verdict is Verdict.CLEAN, report.origins
    told = [finding.severity for finding in report.findings]
    assert told == ([Severity.WARNING] if way == "sweep" else [])


def serves(way: str, out: str) -> None:
    """Two clients send what they made to rank 2, which sends the gradients back."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            optimizer.zero_grad()
            given = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
            if rank < 2:
                made, gradient = model(given[0]), torch.empty(4, 6)
                dist.send(made.detach(), 2)
                dist.recv(gradient, 2)
                made.backward(gradient)
            else:
                for source in range(2):
                    dist.recv(given[source].data, source)
                    model(given[source]).square().mean().backward()
                for source in range(2):
                    dist.send(given[1 - source if way == "crossed" else source].grad, source)
            optimizer.step()


@pytest.mark.parametrize("way", ["back", "crossed"])
def test_the_gradient_of_a_message_goes_back_to_its_sender(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    report = report_of(ranks, serves, way, folder=tmp_path, world=3)
    assert [(f.kind, f.ranks) for f in report.origins[:1]] == (
        [(Kind.COLLECTIVE, (2,))] if way == "crossed" else []
    )
