"""A small ViT in DDP with checkpointed blocks and stochastic depth; all ranks draw for all rows.

Wrong: a block draws inside its checkpoint. The numbers come from a generator of their own, whose
state checkpointing does not set back: backward runs through other branches than forward.
"""

import torch
from common import HEADS, Job, points, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROWS, PATCHES, WIDE = 12, 9, 16


class Draws:
    """Which rows keep their branch: alike on every rank, of which each takes its own."""

    def __init__(self, job: Job) -> None:
        self.job, self.generator = job, torch.Generator().manual_seed(3)

    def next(self) -> Tensor:
        kept = torch.rand(ROWS, 1, 1, generator=self.generator) < 0.7
        return self.job.mine(kept.float()) / 0.7


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.attention = nn.MultiheadAttention(WIDE, HEADS, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(WIDE, 32), nn.GELU(), nn.Linear(32, WIDE))

    def forward(self, x: Tensor, keeps: Tensor | Draws) -> Tensor:
        keeps = keeps.next() if isinstance(keeps, Draws) else keeps
        y = self.norm_1(x)
        x = x + keeps * self.attention(y, y, y, need_weights=False)[0]
        return x + keeps * self.inner(self.norm_2(x))


class Vit(nn.Module):
    def __init__(self, draws: Draws, wrong: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDE, 4, stride=4)
        self.place = nn.Parameter(0.02 * torch.randn(PATCHES, WIDE))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, 5)
        self.draws, self.wrong = draws, wrong

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            keeps = self.draws if self.wrong else self.draws.next()
            x = checkpoint(layer, x, keeps, use_reentrant=False)
        return self.head(self.norm(x).mean(1))


def main(job: Job) -> None:
    model = DistributedDataParallel(Vit(Draws(job), job.wrong))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        images, labels = points(step, ROWS, 3, 12, 12), points(step + 99, ROWS).abs().long() % 5
        nn.functional.cross_entropy(model(job.mine(images)), job.mine(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
