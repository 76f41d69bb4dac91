"""Plain parameters and other meshes beside DTensors: what a layout does not speak of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import rankscope
from rankscope.diagnosis.check import check
from rankscope.record.finding import Verdict
from rankscope.tree.reader import open_trace
from tests.diagnosis.paper import told
from tests.diagnosis.traced import report_of, traced
from tests.distributed.pool import RankPool


class Scaled(nn.Module):
    """An activation with a parameter of one element, as Apertus has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((size,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.alpha.repeat_interleave(x.shape[-1] // self.alpha.numel())


class Summed(torch.autograd.Function):
    """Adds up what the ranks of a group hand in; each of them has its own part of the gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return grads


class Mlp(nn.Module):
    """A column-parallel and a row-parallel layer with an activation between them."""

    def __init__(self, sizes: int) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(6, 8, bias=False), Scaled(sizes)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(self.act(self.up(x)))
        return made + Summed.apply(self.expert(x)) if hasattr(self, "expert") else made


def trains(how: str, out: str) -> None:
    """Two steps of a block on a mesh of two tensor-parallel ranks.

    `how`: "apart" leaves the gradient of the one element to each rank, "summed" reduces it, "cut"
    gives each rank a parameter of its own with a part of the elements, "expert" has beside the
    DTensors an expert of each rank's own with such a parameter.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Module()
    model.mlp = Mlp(4 if how == "cut" else 1)  # cut: 4 of the 8 scales that the whole model has
    x = torch.randn(4, 6)
    if how == "expert":
        torch.manual_seed(10 + rank)
        model.mlp.expert = Mlp(1)
    model.forward = lambda x: model.mlp(x)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(x).square().sum().backward()
            if how != "apart":
                reduced = model.mlp.act.alpha.grad
                if how != "cut" and reduced is not None:
                    dist.all_reduce(reduced)
            optimizer.step()
            optimizer.zero_grad()


def test_one_element_beside_dtensors_is_no_shard_and_its_gradient_has_to_be_summed(
    ranks: RankPool, tmp_path: Path
):
    report = report_of(ranks, trains, "apart", folder=tmp_path)
    found = told(report.origins[0])
    assert found == ("gradient-not-reduced", "grads", "mlp.act", "grad:alpha", (0, 1))


@pytest.mark.parametrize("how", ["summed", "cut", "expert"])
def test_right_programs_with_small_plain_parameters_beside_dtensors_are_clean(
    ranks: RankPool, tmp_path: Path, how: str
):
    report = report_of(ranks, trains, how, folder=tmp_path)
    assert report.verdict is Verdict.CLEAN, report.findings


def on_two_meshes(reduces: bool, out: str) -> None:
    """Two tensor-parallel pairs, data-parallel by hand: their DTensors know of one pair each."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(pair, whole["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.SGD(pair.parameters(), lr=0.1, foreach=False)
    torch.manual_seed(1 + rank // 2)
    with rankscope.trace(pair, out=out, steps="all"):
        for _ in range(2):
            pair(torch.randn(4, 6)).square().mean().backward()
            for parameter in pair.parameters():
                if reduces:
                    dist.all_reduce(parameter.grad.to_local(), group=whole["dp"].get_group())
            optimizer.step()
            optimizer.zero_grad()


def test_pieces_at_one_place_of_two_meshes_are_replicas_where_they_began_equal(
    ranks: RankPool, tmp_path: Path
):
    right = traced(ranks, on_two_meshes, True, folder=tmp_path / "right", world=4)
    assert check(open_trace(right)).verdict is Verdict.CLEAN
    wrong = traced(ranks, on_two_meshes, False, folder=tmp_path / "wrong", world=4)
    report = check(open_trace(wrong))
    assert {f.kind.value for f in report.origins} == {"gradient-not-reduced"}
    assert {name for f in report.origins for name in f.evidence["parameters"]} >= {
        "0.bias",
        "1.bias",
    }
    assert all(f.ranks == (0, 1, 2, 3) for f in report.origins if f.slot == "grad:weight")
    assert np.unique([f.step for f in report.origins]).tolist() == [0]
