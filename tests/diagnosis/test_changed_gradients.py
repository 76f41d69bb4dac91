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


def reduces_flat(way: str, out: str) -> None:
    """Average gradients in one flat tensor, and take them out of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
        model[2].load_state_dict(model[0].state_dict() if way == "tied" else model[2].state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            y = torch.tanh(model[0](x) + model[1](x))  # of one gradient from the start
            model[2](y).pow(2).mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients]) / world
            dist.all_reduce(flat)
            parts = list(flat.split([gradient.numel() for gradient in gradients]))
            if way == "overlapping":
                parts[4] = parts[0]
            if way == "tied":
                parts[0] = parts[4] = parts[0] + parts[4]
                parts[1] = parts[5] = parts[1] + parts[5]
            for gradient, part in zip(gradients, parts):
                gradient.copy_(part.view_as(gradient))
            optimizer.step()


@pytest.mark.parametrize("way", ["right", "tied", "overlapping"])
def test_two_parameters_that_take_one_gradient_are_told_from_tied_ones(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    report = report_of(ranks, reduces_flat, way, folder=tmp_path)
    named = [(f.kind, f.path, f.slot, f.step, f.ranks) for f in report.origins]
    wrong = (Kind.COLLECTIVE, "@Linear.2", "grad:weight", 0, (0, 1))
    assert named[:1] == ([wrong] if way == "overlapping" else [])
