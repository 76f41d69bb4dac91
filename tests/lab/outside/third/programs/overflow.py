"""Gradients and optimizer states are spread over ranks (ZeRO-2 by hand), half precision.

`ShardedGradScaler` tells all ranks of an overflow. Wrong: the plain `GradScaler`, where a rank
hears only of an overflow in the gradients that it owns.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        nn.init.normal_(self.inner.weight, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.inner(x), 0.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def owners(model: nn.Module, world: int) -> dict[nn.Parameter, int]:
    """Return the rank that owns each parameter: the same number of elements for each, in order."""
    parameters, before = list(model.parameters()), 0
    total, owner = sum(p.numel() for p in parameters), {}
    for p in parameters:
        owner[p] = min(before * world // total, world - 1)
        before += p.numel()
    return owner


def main(job: Job) -> None:
    model = Net()
    owner = owners(model, job.world)
    optimizer = torch.optim.SGD([p for p in owner if owner[p] == job.rank], lr=1e-3, momentum=0.9)
    kind = torch.amp.GradScaler if job.wrong else ShardedGradScaler
    scaler = kind("cpu", init_scale=2.0**11, backoff_factor=2.0**-5, growth_interval=100)
    for step in range(5):
        x = points(step, 8, 16)
        y = torch.stack([x[:, 0], x[:, 1:3].prod(1)], 1)
        with torch.autocast("cpu", dtype=torch.float16):
            guess = model(job.mine(x))
        scaler.scale(F.smooth_l1_loss(guess.float(), job.mine(y))).backward()
        for p, rank in owner.items():
            p.grad /= job.world
            dist.reduce(p.grad, rank)
            if rank != job.rank:
                p.grad = None
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for p, rank in owner.items():
            dist.broadcast(p.data, rank)
        if job.save:
            print(f"rank {job.rank} step {step} scale {scaler.get_scale():g}", flush=True)
    job.keep(model.named_parameters())


run(main)
