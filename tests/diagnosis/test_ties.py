"""An embedding and a head that were one parameter, and are two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rankscope
from rankscope.record.finding import Severity
from tests.diagnosis.paper import told
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


class Speaks(nn.Module):
    """Token to token, and a frozen copy of itself where it has a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(12, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.tokens(x)))


def trains(how: str, out: str) -> None:
    """`how`: "cut twice" makes a DTensor of each module's weight, "cut once" ties them again,
    "copied" trains a plain head of its own, "frozen" has a teacher beside it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Speaks()
    if how.startswith("cut"):
        for module in (model.tokens, model.head):
            cut = distribute_tensor(module.weight.detach(), mesh, [Shard(1)])
            module.weight = nn.Parameter(cut)
        model.norm.weight = nn.Parameter(distribute_tensor(model.norm.weight, mesh, [Replicate()]))
        model.norm.bias = nn.Parameter(distribute_tensor(model.norm.bias, mesh, [Replicate()]))
    if how == "cut once":
        model.head.weight = model.tokens.weight
    if how == "copied":
        model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    if how == "frozen":
        model.teacher = nn.Linear(6, 12, bias=False)
        model.teacher.weight = nn.Parameter(model.tokens.weight.detach().clone(), False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            tokens = torch.arange(12).reshape(2, 6)
            if how.startswith("cut"):
                tokens = distribute_tensor(tokens, mesh, [Replicate()])
            made = model(tokens)
            made = made.full_tensor() if how.startswith("cut") else made
            made.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_tie_that_was_cut_twice_is_two_parameters(ranks: RankPool, tmp_path: Path):
    (found,) = report_of(ranks, trains, "cut twice", folder=tmp_path).origins
    assert told(found) == ("structure-mismatch", "setup", "head", "param:weight", (0, 1))
    assert "tokens.weight" in found.message


@pytest.mark.parametrize("how", ["cut once", "frozen"])
def test_ties_that_hold_and_copies_that_do_not_train_are_nothing(
    ranks: RankPool, tmp_path: Path, how: str
):
    assert not report_of(ranks, trains, how, folder=tmp_path).findings


def test_a_plain_head_that_began_as_a_copy_is_a_warning(ranks: RankPool, tmp_path: Path):
    (found,) = report_of(ranks, trains, "copied", folder=tmp_path).findings
    assert found.severity is Severity.WARNING
