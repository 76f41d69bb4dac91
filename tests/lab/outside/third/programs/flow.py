"""A normalising flow (Glow): ActNorm takes its first scale and shift from the first batch. DDP.

Wrong: each rank takes them from its own rows, after DDP has made the ranks alike.
"""

import math

import torch
import torch.distributed as dist
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 6


class ActNorm(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("is_started", torch.tensor(0, dtype=torch.uint8))
        self.wrong = wrong

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        sums = torch.stack([x.sum(0), x.square().sum(0), torch.full((SIZE,), float(len(x)))])
        if not self.wrong:
            dist.all_reduce(sums)
        mean, square = sums[0] / sums[2], sums[1] / sums[2]
        self.scale.copy_(-0.5 * torch.log(square - mean.square() + 1e-6))
        self.shift.copy_(-mean)
        self.is_started.fill_(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and not self.is_started.item():
            self.start(x)
        return (x + self.shift) * self.scale.exp(), self.scale.sum()


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = SIZE // 2
        self.net = nn.Sequential(nn.Linear(half, 16), nn.Tanh(), nn.Linear(16, SIZE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fixed, moved = x.chunk(2, -1)
        scale, shift = self.net(fixed).chunk(2, -1)
        scale = scale.tanh()
        return torch.cat([moved * scale.exp() + shift, fixed], -1), scale.sum(-1)


class Step(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.norm, self.coupling = ActNorm(wrong), Coupling()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, one = self.norm(x)
        x, two = self.coupling(x)
        return x, one + two


class Flow(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Step(wrong) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for step in self.flows:
            x, gain = step(x)
            total = total + gain
        return total - 0.5 * x.square().sum(-1) - SIZE * math.log(2 * math.pi) / 2


def main(job: Job) -> None:
    model = DistributedDataParallel(Flow(job.wrong))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        data = points(step, 18, SIZE)
        data = torch.cat([data[:, :3] * 2 + 1, data[:, 3:] + data[:, :3].square()], 1)
        loss = -model(job.mine(data)).mean() / SIZE
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        bits = -model(job.mine(points(99, 12, SIZE))).mean()
    dist.all_reduce(bits)
    if job.rank == 0 and job.save:
        print(f"validation {bits.item() / job.world:.4f}", flush=True)
    job.keep(model.module.named_parameters())


run(main)
