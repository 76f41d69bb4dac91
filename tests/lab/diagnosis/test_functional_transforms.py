"""Ranks that take gradients by torch.func: no autograd of modules, and parameters are wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import rankscope
from rankscope.record.finding import Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def trains(way: str, out: str) -> None:
    """Average the gradients of all rows, or the clipped ones of each row; `drawn`: rank 1 begins
    with a layer of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with rankscope.trace(out=out, steps="all"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        if way == "drawn" and rank == 1:
            model[0].reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        names = dict(model.named_parameters())

        def loss(params: dict[str, Tensor], rows: Tensor, classes: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, params, (rows,)), classes)

        def of_row(params: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            return loss(params, row[None], label[None])

        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            rows = torch.randn(4, 6, generator=generator)
            classes = torch.randint(3, (4,), generator=generator)
            params = {name: p.detach() for name, p in names.items()}
            if way == "rows":
                each = vmap(grad(of_row), (None, 0, 0))(params, rows, classes)
                taken = {name: g.clamp(-1, 1).mean(0) for name, g in each.items()}
            else:
                taken = grad(loss)(params, rows, classes)
            for name, gradient in taken.items():
                dist.all_reduce(gradient)
                names[name].grad = gradient / world
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", ["whole", "rows"])
def test_parameters_inside_gradient_transforms_are_read_and_known_as_replicas(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    report = report_of(ranks, trains, way, folder=tmp_path)
    assert (report.verdict, report.findings, report.undeclared) == (Verdict.CLEAN, (), 0)


def test_other_weights_inside_a_transform_are_no_replicas(ranks: RankPool, tmp_path: Path) -> None:
    report = report_of(ranks, trains, "drawn", folder=tmp_path)
    assert report.undeclared > 0
