"""An autoencoder with a codebook that follows a moving average (VQ-VAE), DDP.

Wrong: each rank counts its own rows only.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Job, points, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CODES, DIM = 8, 4


class Quantizer(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        codes = torch.randn(CODES, DIM)
        self.register_buffer("codes", codes)
        self.register_buffer("sums", codes.clone())
        self.register_buffer("counts", torch.ones(CODES))

    @torch.no_grad()
    def follow(self, x: Tensor, best: Tensor) -> None:
        chosen = F.one_hot(best, CODES).float()
        counts, sums = chosen.sum(0), chosen.T @ x
        if not self.wrong:
            dist.all_reduce(counts)
            dist.all_reduce(sums)
        self.counts.lerp_(counts, 0.2)
        self.sums.lerp_(sums, 0.2)
        self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.cdist(x, self.codes).argmin(-1)
        taken = self.codes[best]
        if self.training:
            self.follow(x.detach(), best)
        return x + (taken - x).detach(), F.mse_loss(x, taken)


class Autoencoder(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, DIM))
        self.quantizer = Quantizer(wrong)
        self.decoder = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        taken, apart = self.quantizer(self.encoder(x))
        return self.decoder(taken), apart


def main(job: Job) -> None:
    model = DistributedDataParallel(Autoencoder(job.wrong), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(4):
        x = job.mine(points(step, 24, 10))
        made, apart = model(x)
        (F.mse_loss(made, x) + 0.25 * apart).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.module.state_dict().items())


run(main)
