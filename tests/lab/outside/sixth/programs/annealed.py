"""An autoencoder with soft codes in DDP; the softer a code the higher its temperature.

Each training forward cools it down. After a step rank 0 rebuilds a few rows for its log. Wrong: it
leaves the model in training mode for that, and its temperature falls twice as fast.
"""

import torch
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, INPUTS, SIZE, CODES = 12, 10, 8, 6


class Codes(nn.Module):
    """Mixes entries of a table by how near they are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(CODES, SIZE))
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.table.T / self.temperature.clone()).softmax(-1)
        if self.training:
            self.temperature *= 0.8
        return weights @ self.table


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUTS, 16), nn.SiLU(), nn.Linear(16, SIZE))
        self.codes = Codes()
        self.decoder = nn.Sequential(nn.Linear(SIZE, 16), nn.SiLU(), nn.Linear(16, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.codes(self.encoder(x)))


@torch.no_grad()
def log(net: Autoencoder, rows: Tensor, job: Job) -> None:
    """Print how well some rows are rebuilt."""
    net.train(job.wrong)
    error = (net(rows) - rows).square().mean()
    net.train()
    if job.save:
        print(f"rebuilt with an error of {error:.3f}")


def main(job: Job) -> None:
    net = Autoencoder()
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-2, eps=1e-4)
    for step in range(4):
        x = job.mine(points(step, ROWS, INPUTS))
        (model(x) - x).square().mean().backward()
        job.note(net.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
        if job.rank == 0:
            log(net, points(90, 3, INPUTS), job)
    job.keep([*net.named_parameters(), *net.named_buffers()])


run(main)
