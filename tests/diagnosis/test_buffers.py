"""Buffers and frozen parameters that replicas should have in common, and those they may not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankscope
from rankscope.record.finding import Kind, Severity, Verdict
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


class Scaled(nn.Module):
    """A layer with a table that no checkpoint holds, and frozen random features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", 1 / 10 ** (torch.arange(6) / 6), persistent=False)
        self.features = nn.Linear(6, 6).requires_grad_(False)
        self.learns = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.learns(torch.cos(self.features(x)) * self.table)


def begins(way: str, out: str) -> None:
    """Ranks that hold the same parameters, one of which begins with something else."""
    torch.manual_seed(0)
    model = Scaled()
    rank = dist.get_rank()
    with torch.no_grad():
        if way == "zeros" and rank == 1:
            model.table.zero_()
        elif way == "slices":  # as context-parallel ranks hold positions
            model.table.copy_(torch.arange(6) + 6 * rank)
        elif way == "drawn":
            model.table.copy_(torch.randn(6, generator=torch.Generator().manual_seed(rank)))
        elif way == "features" and rank == 2:
            model.features.weight.mul_(2)
    if way == "zeros":
        fully_shard(model)
    optimizer = torch.optim.SGD(model.learns.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            if way != "zeros":
                for parameter in model.learns.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()


@pytest.mark.parametrize(
    ("way", "world", "place", "odd"),
    [
        ("zeros", 2, ("", "buffer:table"), (1,)),
        ("features", 3, ("features", "param:weight"), (2,)),
    ],
)
def test_what_one_replica_begins_without_is_named(
    ranks: RankPool, tmp_path: Path, way: str, world: int, place: tuple[str, str], odd: tuple[int]
):
    (first,) = report_of(ranks, begins, way, folder=tmp_path, world=world).origins
    assert (first.kind, first.phase, first.ranks) == (Kind.REPLICA, Phase.SETUP, odd)
    assert (first.path, first.slot) == place


@pytest.mark.parametrize("way", ["slices", "equal"])
def test_slices_of_a_table_are_each_rank_s_own(ranks: RankPool, tmp_path: Path, way: str):
    report = report_of(ranks, begins, way, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


class Codes(nn.Module):
    """Averages over time of what rows chose, and what each rank's own rows chose last."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(3))
        self.register_buffer("sums", torch.randn(3, 6))
        self.register_buffer("chosen", torch.zeros(3))
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.sums / self.counts[:, None]
        chosen = torch.nn.functional.one_hot(torch.cdist(x, codes).argmin(1), 3).float()
        counts, sums = chosen.sum(0), chosen.T @ x.detach()
        self.chosen.copy_(counts)
        if self.shared != "none":
            dist.all_reduce(sums)
            handed = self.chosen.clone()
            dist.all_reduce(handed)
            counts = handed if self.shared == "both" else counts
        self.counts.lerp_(counts + 0.1, 0.3)
        self.sums.lerp_(sums, 0.3)
        return x + (chosen @ codes - x).detach()


class Coder(nn.Module):
    def __init__(self, shared: str) -> None:
        super().__init__()
        self.encoder, self.codes = nn.Linear(6, 6), Codes(shared)
        self.norm, self.decoder = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("carried", torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x) + self.carried
        self.carried.copy_(x.detach())  # of this rank's rows
        return self.decoder(self.norm(self.codes(x)))


def codes(shared: str, out: str) -> None:
    torch.manual_seed(0)
    model = Coder(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()


def test_statistics_carried_rows_and_what_is_summed_over_ranks_may_differ(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, codes, "both", folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


def test_an_average_that_is_not_reduced_beside_one_that_is_is_named(
    ranks: RankPool, tmp_path: Path
):
    (first,) = report_of(ranks, codes, "sums", folder=tmp_path).origins
    assert (first.kind, first.path, first.slot) == (Kind.REPLICA, "codes", "buffer:counts")
    assert "codes:buffer:sums changed and agrees" in first.message


def test_averages_that_each_rank_keeps_for_itself_are_one_warning(ranks: RankPool, tmp_path: Path):
    report = report_of(ranks, codes, "none", folder=tmp_path)
    assert report.verdict is Verdict.CLEAN
    (warning,) = report.findings
    assert (warning.severity, warning.path) == (Severity.WARNING, "codes")
