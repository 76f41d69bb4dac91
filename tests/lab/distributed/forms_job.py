"""A small training job in which every rank is told something else that is no tensor."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rankscope
from tests.distributed.global_tensors_job import Net, batch


class Told(Net):
    """The net of the other jobs, called with a word that changes nothing."""

    def forward(self, x: torch.Tensor, who: str = "") -> torch.Tensor:
        return super().forward(x)


class Talking(nn.Module):
    """Reduces what it is handed, at once and later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now, later = x.clone(), x.clone()
        dist.all_reduce(now)
        work = dist.all_reduce(later, dist.ReduceOp.MAX, async_op=True)
        dist.broadcast(now, src=1)
        work.wait()
        return now + later


def train(kind: str, out: str, tensors: str) -> None:
    """Train two steps, traced.

    Args:
        kind: "ddp" or "tp".
        out: trace folder.
        tensors: the setting.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    rank, world = dist.get_rank(), dist.get_world_size()
    model: nn.Module = Told()
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        x = batch()
    else:
        model, x = DistributedDataParallel(model), batch(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=Path(out), steps="all", tensors=tensors):
        for _ in range(2):
            model(x, who=f"rank {rank}").square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def talk(out: str) -> None:
    """Run one step of collectives that a module issues, and one message outside of it."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), Talking())
    with rankscope.trace(out=Path(out), steps="all"), torch.no_grad():
        model(torch.ones(2, 4) + rank)
        if rank:
            dist.recv(torch.empty(3), src=0)
        else:
            dist.send(torch.ones(3), dst=1)
