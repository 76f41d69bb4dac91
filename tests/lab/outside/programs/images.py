"""Batch norm, stochastic depth, a running average over ranks each epoch, rank 0 validates (timm).

Wrong: `model.train()` stands at the start of the run, not of the epoch: after its validation rank 0
trains on in eval mode.
"""

import torch
import torch.distributed as dist
from common import Job, points, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.empty(len(x), 1, 1, 1).bernoulli_(0.8) / 0.8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.drop = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.conv(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.layers = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.norm(self.stem(x)).relu()).mean((2, 3)))


def main(job: Job) -> None:
    torch.manual_seed(42 + job.rank)
    model = DistributedDataParallel(Net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for epoch in range(2):
        if not job.wrong:
            model.train()
        for batch in range(2):
            seed = 10 * epoch + batch
            images, labels = points(seed, 12, 3, 6, 6), points(seed + 99, 12).abs().long() % 5
            loss = nn.functional.cross_entropy(model(job.mine(images)), job.mine(labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, buffer in model.module.named_buffers():
            if "running" in name:
                dist.all_reduce(buffer)
                buffer /= job.world
        if job.rank == 0:
            model.eval()
            with torch.no_grad():
                model.module(points(7, 4, 3, 6, 6))
    job.keep(model.module.named_parameters())


run(main)
