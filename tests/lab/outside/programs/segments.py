"""Segmentation in DDP; batch norm over all ranks, by hand.

Wrong: `dist.all_reduce` sums the statistics, which has no backward of its own.
"""

import torch
import torch.distributed as dist
from common import Job, points, run
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel


class Summed(Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class GlobalNorm(nn.Module):
    def __init__(self, channels: int, wrong: bool) -> None:
        super().__init__()
        self.weight, self.bias = [nn.Parameter(v * torch.ones(channels)) for v in (1.0, 0.0)]
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("square", torch.ones(channels))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            stats = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
            if self.wrong:
                dist.all_reduce(stats)
            else:
                stats = Summed.apply(stats)
            mean, square = stats / dist.get_world_size()
            self.mean.lerp_(mean.detach(), 0.1)
            self.square.lerp_(square.detach(), 0.1)
        else:
            mean, square = self.mean, self.square
        scale = self.weight * (square - mean.square() + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int, wrong: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = GlobalNorm(outputs, wrong)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class Segmenter(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.down, self.deep = Stage(3, 6, wrong), Stage(6, 8, wrong)
        self.up, self.head = Stage(14, 6, wrong), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        near = self.down(x)
        far = self.deep(nn.functional.max_pool2d(near, 2))
        far = nn.functional.interpolate(far, scale_factor=2.0)
        return self.head(self.up(torch.cat([near, far], 1)))


def main(job: Job) -> None:
    model = DistributedDataParallel(Segmenter(job.wrong))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        images = points(step, 8, 3, 6, 6) + torch.linspace(-1, 1, 8)[:, None, None, None]
        labels = (images.sum(1) > 0).long() + 2 * (images[:, 0] > 0.5)
        nn.functional.cross_entropy(model(job.mine(images)), job.mine(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
