"""Networks that tests share, and how they are trained and traced.

A test has a network of its own only where what that does is what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Two(nn.Module):
    """Two linears, called `a` and `b`."""

    def __init__(self, width: int = 8, out: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Residual(nn.Module):
    """Two linears beside what they are handed; `last` may be a module that does nothing."""

    def __init__(self, width: int = 4, *, has_last: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last = nn.Identity() if has_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        return x + (y if self.last is None else self.last(y))


class Layered(nn.Module):
    """Layers in a list and a head, each layer checkpointed where that is asked for."""

    def __init__(
        self, layers: Iterable[nn.Module], head: nn.Module, *, is_checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(x)


class Normed(nn.Module):
    """A linear, a norm and a linear."""

    def __init__(self, first: nn.Module, norm: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = first, norm, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Failing(nn.Module):
    """Raises what it is made with in its first calls, behind a linear."""

    def __init__(
        self, error: BaseException | type[BaseException], width: int = 8, times: float = 1
    ) -> None:
        super().__init__()
        self.linear, self.error, self.times = nn.Linear(width, width), error, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self.times = self.linear(x), self.times - 1
        if self.times >= 0:
            raise self.error
        return x


class DividesByZero(nn.Module):
    """Hands out what is not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x - x)


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


class Headed(nn.Module):
    """A trunk of all ranks, and a head of this rank whose bias began as everywhere."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.head.weight.mul_(1 + rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.trunk(x)))


class Elastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.worker, self.center = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.worker(x) if self.training else self.center(x)


class Writes(nn.Module):
    """A language model with a table, that goes on writing where a prompt ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 9)
        self.register_buffer("table", torch.arange(6.0) / 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids) * self.table))


class Requantized(nn.Module):
    """Makes whole numbers of a part, gathers them, and makes numbers of them again."""

    largest: torch.Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        self.largest.copy_(x.detach().abs().max())
        if self._way in ("shared", "turned"):
            dist.all_reduce(self.largest, dist.ReduceOp.MAX)
        step = self.largest.clone() / 31
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, (x.detach() / step).round())
        if self._way == "turned":  # its own part first
            parts = parts[rank:] + parts[:rank]
        if self._way == "weighed":  # each rank's own part counts more
            parts[rank] = parts[rank] * 2
        return torch.cat(parts) * step + 0.0 * x.sum()


class OffsetOfRankZero(nn.Module):
    """Adds what rank 0 has."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = torch.full((6,), float("nan"))
        if dist.get_rank() == 0 and self._way == "filled":
            offset = torch.linspace(0, 1, 6)
        dist.broadcast(offset, 0)
        return self.fc(x) + offset


class Masked(Two):
    """Draws a mask of its own between its linears."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return self.b(x * (torch.rand(x.shape, generator=self.generator) > 0.4))


class Parts(nn.Linear):
    """Adds up the parts that ranks make of one input, and forgets to add up its gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = super().forward(x)
        total = part.detach().clone()
        dist.all_reduce(total)
        return part + (total - part).detach()
