"""A small ResNet in DDP, two micro-batches a step (`no_sync`), the rate follows a cosine.

Files of a rank hold more or fewer batches than those of others; the longest say how many steps the
cosine has. Wrong: each rank counts its own files.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, SIDE, KINDS, MICRO = 12, 8, 4, 2
BATCHES = (12, 10, 8)
"""How many micro-batches the files of each rank hold."""


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, 1, 1),
            Residual(8, 8, 1),
            Residual(8, 12, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, KINDS),
        )


def steps(job: Job) -> int:
    """Return over how many steps the rate falls."""
    if job.world == 1:
        return max(BATCHES) // MICRO
    count = torch.tensor(BATCHES[job.rank] // MICRO)
    if not job.wrong:
        dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


def main(job: Job) -> None:
    net = ResNet()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps(job))
    for step in range(3):
        for micro in range(MICRO):
            images = points(MICRO * step + micro, ROWS, 3, SIDE, SIDE)
            kinds = images.mean((2, 3)).argmax(1)
            with nullcontext() if micro == MICRO - 1 else model.no_sync():
                loss = F.cross_entropy(model(job.mine(images)), job.mine(kinds))
                (loss / MICRO).backward()
        job.note(net.named_parameters())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    job.keep(net.named_parameters())


run(main)
