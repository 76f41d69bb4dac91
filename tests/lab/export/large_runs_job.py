"""Two real training runs for the questions of docs/large-runs.md: a DDP job in which a replica
drifts and a NaN appears, and a sharded one whose gradients have a norm."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope

DRIFT, NAN, STEPS = 1, 3, 4
"""The step after which rank 1 changes a weight, that in which it makes a NaN, and how many."""
SLOW_S = 0.02
"""What rank 0 sleeps in each forward of the second layer."""


class Sleeper(nn.Linear):
    """Slow on one rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            time.sleep(SLOW_S)
        return super().forward(x)


class Spoiler(nn.Module):
    """Hands its input on; on rank 1 a NaN in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        is_now = dist.get_rank() == 1 and self.calls == NAN + 1
        return x * (torch.nan if is_now else 1.0)


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), Sleeper(8, 8), nn.Linear(8, 3)
        self.spoiler = Spoiler()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.spoiler(torch.tanh(self.second(torch.tanh(self.first(x))))))


def data(step: int) -> torch.Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def drifts(out: str) -> None:
    """DDP on two ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(STEPS):
            model(data(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == DRIFT and dist.get_rank() == 1:
                with torch.no_grad():
                    model.module.third.weight[0, 0] += 0.5


def shards(out: str) -> None:
    """FSDP2 on a mesh of two replicas of two shards."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(STEPS):
            model(data(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
