"""Physics in SI units, DDP with a hook that sends gradients in half precision.

Targets are small, and so are gradients. bfloat16 has the range of float32. Wrong: float16, for
which most gradients are too small.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

ROWS, INPUTS, SIZE, UNIT = 12, 4, 16, 2e-4


class Field(nn.Module):
    """A small network whose output is in metres."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return UNIT * self.layers(x)


def halve(dtype: torch.dtype, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients in a smaller dtype (as torch's hooks do)."""
    sent = bucket.buffer().to(dtype).div_(dist.get_world_size())
    done = dist.all_reduce(sent, async_op=True).get_future()
    return done.then(lambda sums: bucket.buffer().copy_(sums.value()[0]))


def main(job: Job) -> None:
    net = Field()
    model = DistributedDataParallel(net)
    model.register_comm_hook(torch.float16 if job.wrong else torch.bfloat16, halve)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / UNIT**2, momentum=0.9)
    for step in range(3):
        x = points(step, ROWS, INPUTS)
        truth = UNIT * torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)
        F.mse_loss(model(job.mine(x)), job.mine(truth)).backward()
        job.note(net.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(net.named_parameters())


run(main)
