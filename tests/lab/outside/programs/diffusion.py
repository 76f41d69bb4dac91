"""A denoiser in DDP with a copy that is its moving average (diffusers); samples are judged with it.

Wrong: `if rank == 0: ema.step(...)`, though every rank evaluates with its copy.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from common import Job, points, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16))
        self.inner = nn.Linear(8, 16)
        self.norm = nn.GroupNorm(4, 16)
        self.outer = nn.Linear(16, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.outer(nn.functional.silu(self.norm(self.inner(x)) + self.time(t)))


def loss_of(job: Job, model: nn.Module, seed: int) -> Tensor:
    clean, noise = points(seed, 12, 8).sin(), points(seed + 500, 12, 8)
    t = torch.rand(12, 1, generator=torch.Generator().manual_seed(seed + 900))
    noisy = (1 - t) * clean + t * noise
    guess = model(job.mine(noisy), job.mine(t))
    return (guess - job.mine(noise - clean)).square().mean()


def main(job: Job) -> None:
    torch.manual_seed(job.rank if job.world > 1 else 0)
    model = DistributedDataParallel(Denoiser())
    ema = deepcopy(model.module).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        loss_of(job, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.rank == 0 or not job.wrong:
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.5)
        if step % 2 == 1:
            with torch.no_grad():
                judged = loss_of(job, ema, 100 + step)
                dist.all_reduce(judged)
    job.keep((f"ema.{name}", p) for name, p in ema.named_parameters())


run(main)
