"""Small models the tests of this room share, and how they are trained and traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rankscope
from rankscope.tree.views import Trace


class Block(nn.Module):
    """Two linears, a buffer, a keyword argument."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.relu(self.up(x))) * self.mask


class Net(nn.Module):
    """A small model with a list of blocks."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def train(
    model: nn.Module, steps: int = 2, micro_batches: int = 1, loss: nn.Module | None = None
) -> list[float]:
    """Train with SGD; return the losses."""
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            out = model(torch.randn(4, 8, generator=generator))
            value = loss(out, torch.zeros_like(out)) if loss is not None else out.square().mean()
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def trace(
    tmp_path: Path, body: Callable[[], object], model: nn.Module | None = None, **settings: Any
) -> Trace:
    """Trace a body and open the tree."""
    with rankscope.trace(model, out=tmp_path / "trace", **settings) as handle:
        body()
    return handle.open()


def paths(trace: Trace, phase: str, step: int = 0) -> list[str]:
    """Return the paths of one phase in tree order."""
    return [node.path for node in trace.find("*", phase=phase, step=step)]
