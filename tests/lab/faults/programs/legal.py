"""Data-parallel programs that look odd and are right: what a checker is tempted to report."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.lab.faults.model import batch, whole
from tests.lab.faults.programs.data import fully_sharded, sgd, step_of
from tests.lab.faults.setup import RATE, Setup, Trained, train


def frozen_layer(setup: Setup) -> Trained:
    """One layer is frozen: it has no gradients and does not move."""
    model = whole(setup)
    model.layers[str(setup.layer)].requires_grad_(False)
    wrapped = DDP(model)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def tied(setup: Setup) -> Trained:
    """The head shares its weight with the embedding."""
    model = whole(setup)
    model.head.weight = model.embed.weight
    wrapped = DDP(model)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def one_rank_evaluates(setup: Setup) -> Trained:
    """Rank 0 alone evaluates after every step, on the module inside the wrapper."""
    model = whole(setup, dropout=0.2)
    torch.manual_seed(1_000 * setup.seed + dist.get_rank())
    wrapped = DDP(model)

    def one(step: int) -> Tensor:
        loss = step_of(setup, wrapped, step)
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(batch(setup, 1_000 + step)[0])
            model.train()
        return loss

    return train(Trained(model), sgd(model), one)


class Sometimes(nn.Module):
    """A layer that is left out at random, on every rank by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        return x if torch.rand(()) < 0.5 else self.inner(x, first)


def stochastic_depth(setup: Setup) -> Trained:
    """Layers are left out at random on each rank, which DDP is told."""
    model = whole(setup)
    for number, layer in model.layers.items():
        model.layers[number] = Sometimes(layer)
    torch.manual_seed(1_000 * setup.seed + dist.get_rank())
    wrapped = DDP(model, find_unused_parameters=True)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def zero(setup: Setup) -> Trained:
    """Every rank's optimizer steps a part of the parameters and is sent the others."""
    model = whole(setup)
    wrapped = DDP(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    return train(Trained(model), optimizer, lambda step: step_of(setup, wrapped, step))


def hybrid_shards(setup: Setup) -> Trained:
    """FSDP2 on a 2x2 mesh: shards along one axis, replicas of them along the other."""
    mesh = init_device_mesh("cpu", (setup.ranks // 2, 2), mesh_dim_names=("replicas", "shards"))
    model = fully_sharded(whole(setup), mesh)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, model, step))
