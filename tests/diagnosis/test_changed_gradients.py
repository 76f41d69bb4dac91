"""Gradients that were reduced and changed afterwards, beside those that nothing reduced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def trains(way: str, out: str) -> None:
    """Average gradients (or not), and add noise of a common seed, or of each rank's own."""
    rank = dist.get_rank()
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            rows = torch.Generator().manual_seed(10 * step + rank)
            noise = torch.Generator().manual_seed(1000 + step + (rank if way != "common" else 0))
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=rows)).pow(2).mean().backward()
            for parameter in model.parameters():
                if way != "not-reduced":
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
                size = parameter.grad.std()
                parameter.grad += 0.1 * size * torch.randn(parameter.shape, generator=noise)
            optimizer.step()


def kinds(ranks: RankPool, folder: Path, way: str) -> set[tuple[Kind, Phase]]:
    report = report_of(ranks, trains, way, folder=folder)
    return {(finding.kind, finding.phase) for finding in report.origins}


@pytest.mark.parametrize(
    ("way", "kind"),
    [("common", None), ("own", Kind.REPLICA), ("not-reduced", Kind.GRADIENT)],
)
def test_noise_behind_a_reduction_is_told_from_a_reduction_that_is_missing(
    ranks: RankPool, tmp_path: Path, way: str, kind: Kind | None
) -> None:
    assert kinds(ranks, tmp_path, way) == ({(kind, Phase.GRADS)} if kind else set())
