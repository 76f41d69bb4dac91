"""A weather model: ranks have bands of one map, and a convolution sees a row of each neighbour's.

The rows are exchanged with their gradients. DDP averages what the bands say. Wrong: the exchange
gives the gradient of the own rows back, and nobody sends that of the borrowed ones.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

ROWS, HIGH, BROAD, FIELDS, WIDE = 4, 12, 8, 3, 12


def swapped(job: Job, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Send a row to the rank above and one to the rank below; return what they send."""
    above, below = torch.zeros_like(up), torch.zeros_like(down)
    jobs = []
    for peer, sent, received in ((job.rank - 1, up, above), (job.rank + 1, down, below)):
        if 0 <= peer < job.world:
            jobs.append(dist.P2POp(dist.isend, sent.contiguous(), peer))
            jobs.append(dist.P2POp(dist.irecv, received, peer))
    for work in dist.batch_isend_irecv(jobs) if jobs else ():
        work.wait()
    return above, below


class Exchange(Function):
    """Put a row of each neighbour around a band, zeros at the poles."""

    @staticmethod
    def forward(ctx, x, job):
        ctx.job = job
        above, below = swapped(job, x[:, :, :1], x[:, :, -1:])
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx, grad):
        own = grad[:, :, 1:-1].clone()
        if not ctx.job.wrong:
            above, below = swapped(ctx.job, grad[:, :, :1], grad[:, :, -1:])
            own[:, :, :1] += above
            own[:, :, -1:] += below
        return own, None


class Convolution(nn.Module):
    def __init__(self, job: Job, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.job = nn.Conv2d(inputs, outputs, 3, padding=(0, 1)), job

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(Exchange.apply(x, self.job))


class Layer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.inner, self.outer = Convolution(job, WIDE, WIDE), nn.Conv2d(WIDE, WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(x)))


class Weather(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.enter, self.leave = Convolution(job, FIELDS, WIDE), nn.Conv2d(WIDE, FIELDS, 1)
        self.layers = nn.ModuleList(Layer(job) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        for layer in self.layers:
            y = layer(y)
        return x + self.leave(y)


def main(job: Job) -> None:
    net = Weather(job)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-4)
    for step in range(3):
        now = points(step, ROWS, FIELDS, HIGH, BROAD)
        later = now.roll(1, 2) * 0.9 + now.roll(-1, 3) * 0.2
        band, wanted = [x.chunk(job.world, 2)[job.rank].contiguous() for x in (now, later)]
        (model(band) - wanted).square().mean().backward()
        job.note(net.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(net.named_parameters())


run(main)
