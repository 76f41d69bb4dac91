"""One small model, trained on a whole batch by every kind of parallelism, all tensors kept."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rankscope

BATCH, WIDTH, HIDDEN = 8, 6, 10
RATE = 0.1


class Net(nn.Module):
    """A norm that stays whole, two layers that tensor parallelism cuts, a table no batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.table = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + self.table(x)


class Table(nn.Module):
    """Positions: the same for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.arange(float(WIDTH)).reshape(1, WIDTH) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positions.exp()


class HandCut(nn.Module):
    """The two layers cut by hand: plain tensors, an all-reduce behind the second."""

    def __init__(self, whole: Net, part: int, parts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        wide = HIDDEN // parts
        mine = slice(part * wide, (part + 1) * wide)
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH, bias=False)
        self.up.weight.data.copy_(whole.up.weight.data[mine])
        self.up.bias.data.copy_(whole.up.bias.data[mine])
        self.down.weight.data.copy_(whole.down.weight.data[:, mine])
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(torch.relu(self.up(x)))
        dist.all_reduce(made, group=self._group)
        return made


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(place: int = 0, places: int = 1) -> torch.Tensor:
    whole = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
    return whole.chunk(places)[place]


def train(model: nn.Module, x: torch.Tensor, rate: float = RATE) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model(x).square().mean().backward()
    optimizer.step()


def run(kind: str, out: str, layout: str = "") -> None:
    """Train one step, traced. Of "ddp drifting" the last rank's optimizer goes twice as far."""
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    place, places = rank, world
    model: nn.Module = net()
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    if kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), plan)
        place, places = 0, 1
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp x tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        place, places = rank // 2, world // 2
    elif kind.startswith("by hand"):
        rows = [dist.new_group([row, row + 1]) for row in range(0, world, 2)]
        model = HandCut(model, rank % 2, 2, rows[rank // 2])
        place, places = rank // 2, world // 2
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    rate = RATE * (2 if kind == "ddp drifting" and rank == world - 1 else 1)
    ranks = "0" if kind == "ddp, rank 0 traced" else "all"
    with rankscope.trace(
        out=Path(out), steps="all", tensors="**", ranks=ranks, layout=layout or None
    ):
        train(model, batch(place, places), rate)
