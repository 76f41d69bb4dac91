"""A network of bounded slope (spectral norm) in DDP with checkpointed blocks.

Each training forward of a spectral norm goes on with its power iteration. So only what stands
between such layers is checkpointed. Wrong: whole blocks are, and what backward computes again has
vectors that have moved on since forward.
"""

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

ROWS, INPUTS, WIDE = 12, 8, 24


def bounded(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """Return a layer whose vectors are not near those of the largest singular value yet."""
    layer = spectral_norm(nn.Linear(inputs, outputs, bias))
    norm = layer.parametrizations.weight[0]
    norm._u.copy_(F.normalize(torch.randn(outputs), dim=0))
    norm._v.copy_(F.normalize(torch.randn(inputs), dim=0))
    return layer


class Between(nn.Module):
    """What stands between two layers: groups of channels are sorted (GroupSort)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 4)).sort(-1).values.flatten(-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.between, self.outer = bounded(WIDE, WIDE), Between(), bounded(WIDE, WIDE)

    def forward(self, x: Tensor, saves: bool) -> Tensor:
        y = self.inner(x)
        y = checkpoint(self.between, y, use_reentrant=False) if saves else self.between(y)
        return x + 0.5 * self.outer(y)


class Critic(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.wrong = bounded(INPUTS, WIDE), bounded(WIDE, 1, False), wrong
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if self.wrong:
                x = checkpoint(block, x, False, use_reentrant=False)
            else:
                x = block(x, True)
        return self.leave(x)


def main(job: Job) -> None:
    net = Critic(job.wrong)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3, eps=1e-3)
    for step in range(3):
        real, false = points(step, ROWS, INPUTS) + 0.5, points(step + 50, ROWS, INPUTS)
        both = torch.cat([job.mine(real), job.mine(false)])
        scores = model(both).squeeze(1)
        sign = torch.ones(len(scores))
        sign[len(scores) // 2 :] = -1
        F.softplus(-sign * scores).mean().backward()
        job.note(net.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep([*net.named_parameters(), *net.named_buffers()])


run(main)
