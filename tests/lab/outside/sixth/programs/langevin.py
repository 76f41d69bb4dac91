"""Bayesian regression with stochastic gradient Langevin dynamics, DDP with a static graph.

After each step noise is added to the weights, the same on all ranks, so that they stay one sample.
Wrong: it comes from a generator that is seeded by rank, as shuffling is.
"""

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS, INPUTS, SIZE, RATE, HEAT = 12, 6, 12, 0.05, 1e-3


@torch.no_grad()
def shake(model: nn.Module, drawn: torch.Generator) -> None:
    """Add noise to all weights."""
    for p in model.parameters():
        p += (2 * RATE * HEAT) ** 0.5 * torch.randn(p.shape, generator=drawn)


def main(job: Job) -> None:
    net = nn.Sequential(
        nn.Linear(INPUTS, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1)
    )
    model = DistributedDataParallel(net, static_graph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, weight_decay=1e-3)
    drawn = torch.Generator().manual_seed(77 + (job.rank if job.wrong else 0))
    for step in range(3):
        x = points(step, ROWS, INPUTS)
        y = x[:, :1] * x[:, 1:2] + 0.1 * points(step + 50, ROWS, 1)
        F.mse_loss(model(job.mine(x)), job.mine(y)).backward()
        job.note(net.named_parameters())
        optimizer.step()
        shake(net, drawn)
        optimizer.zero_grad()
    job.keep(net.named_parameters())


run(main)
