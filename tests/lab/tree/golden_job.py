"""Two ranks of a job with what the examples lack, for tests/tree/record_golden.py.

Tensor parallelism by hand with a layout file (columns cut unevenly), a checkpointed layer, an
asynchronous collective, an evaluation, and two steps of one optimizer.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5
"""Columns of `up` over both ranks: 3 and 2."""


class Feed(nn.Module):
    """A pair of linear layers, cut by columns and by rows."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, own, bias=False)
        self.down = nn.Linear(own, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A checkpointed layer, then one that is cut by hand."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.feed = Feed(own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.norm, x, use_reentrant=False)
        partial = self.feed(x).clone()
        dist.all_reduce(partial.detach(), async_op=True).wait()
        return x + partial


def main() -> None:
    """Train two steps, then evaluate."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(-(-WIDTH // 2) if int(os.environ["RANK"]) == 0 else WIDTH // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        model.eval()(torch.full((3, 4), float("inf")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
