"""Gradients are averaged by hand in one flat buffer.

Wrong: it is filled in the order of a set of names, which is another one in each process.
"""

import torch
import torch.distributed as dist
from common import Job, points, run
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm_1, self.norm_2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
        self.deep, self.wide = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(self.stem(x)).relu()
        x = x + self.wide(self.norm_2(self.deep(x)).relu())
        return self.head(x.mean((2, 3)))


class Bucket:
    """All gradients as one tensor."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.params, self.world = dict(model.named_parameters()), job.world
        names = {name for name, p in self.params.items() if p.requires_grad}
        self.names = list(names) if job.wrong else sorted(names)

    def average(self) -> None:
        grads = [self.params[name].grad for name in self.names]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= self.world
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(piece.view_as(grad))


def main(job: Job) -> None:
    model = Net()
    bucket = Bucket(job, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(3):
        images, labels = points(step, 12, 3, 6, 6), points(step + 99, 12).abs().long() % 5
        nn.functional.cross_entropy(model(job.mine(images)), job.mine(labels)).backward()
        bucket.average()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
