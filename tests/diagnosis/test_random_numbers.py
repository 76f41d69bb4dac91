"""Dropout that replicas draw apart: whatever is told of it, the advice speaks of random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankscope
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, partial: torch.Tensor) -> torch.Tensor:
        whole = partial.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, whole: torch.Tensor) -> torch.Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return _Summed.forward(ctx, gradient)


class Block(nn.Module):
    """Two linear layers, cut by hand or left for DTensor, and dropout on their replicated sum."""

    def __init__(self, *, by_hand: bool, is_function: bool) -> None:
        super().__init__()
        inner = 8 if by_hand else 16
        self.norm, self.dropout = nn.RMSNorm(8), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(8, inner, bias=False), nn.Linear(inner, 8, bias=False)
        self.by_hand, self.is_function = by_hand, is_function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        if self.by_hand:
            given = _Shared.apply(given)
        made = self.down(torch.relu(self.up(given)))
        if self.by_hand:
            made = _Summed.apply(made)
        if self.is_function:
            return x + nn.functional.dropout(made, 0.3, self.training)
        return x + self.dropout(made)


class Model(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.Sequential(*(Block(**how) for _ in range(2)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))


def tensor_parallel(by_hand: bool, is_function: bool, is_apart: bool, out: str) -> None:
    torch.manual_seed(0)
    model = Model(by_hand=by_hand, is_function=is_function)
    if by_hand:
        torch.manual_seed(10 + dist.get_rank())
        for block in model.layers:
            block.up.reset_parameters()
            block.down.reset_parameters()
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    torch.manual_seed(20 + (dist.get_rank() if is_apart else 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            optimizer.zero_grad()
            tokens = torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(step))
            model(tokens).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("is_function", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("by_hand", [True, False], ids=["by-hand", "dtensor"])
def test_advice_on_dropout_drawn_apart_speaks_of_random_numbers(
    ranks: RankPool, tmp_path: Path, by_hand: bool, is_function: bool
) -> None:
    report = report_of(ranks, tensor_parallel, by_hand, is_function, True, folder=tmp_path)
    first = report.origins[0]
    assert "random numbers" in first.advice
    if not is_function:  # a module shows it: what went in agrees, what came out does not
        assert first.evidence["random_numbers"] == "layers.0.dropout"
        assert first.advice.startswith("layers.0.dropout")


def test_dropout_that_replicas_draw_alike_is_no_fault(ranks: RankPool, tmp_path: Path) -> None:
    assert not report_of(ranks, tensor_parallel, True, False, False, folder=tmp_path).findings
