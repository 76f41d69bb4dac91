"""`rankscope layout` names the axes of DTensors as the program's device mesh does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankscope
from rankscope.diagnosis.layoutproposal import propose_layout
from rankscope.tree.reader import open_trace
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool


def trains(how: str, name: str, out: str) -> None:
    """Two steps of two layers on a mesh of two ranks, whose axis has this name or none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,) if name else None)
    if how == "fsdp":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("how", "name", "expected"),
    [
        ("tensors", "tp", "tp"),
        ("tensors", "model", "model"),
        ("tensors", "", "tp"),
        ("tensors", "not bare", "tp"),
        ("fsdp", "replicas", "replicas"),
        ("fsdp", "", "dp"),
    ],
)
def test_the_axis_of_dtensors_has_the_name_of_its_mesh_or_of_what_it_does(
    ranks: RankPool, tmp_path: Path, how: str, name: str, expected: str
) -> None:
    trace = open_trace(traced(ranks, trains, how, name, folder=tmp_path, world=2))
    assert dict(propose_layout(trace).axes) == {expected: 2}
