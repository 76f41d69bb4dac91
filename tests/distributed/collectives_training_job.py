"""Training loops whose collectives come from torch's own parallelism, or are written by hand."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import rankscope
from tests.distributed.collectives_job import on_torch
from tests.models import Residual
from tests.unharmed import differences, numbers_of

Value = torch.Tensor
STEPS = 3


class Net(nn.Module):
    """Two of them behind a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Value) -> Value:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))


def tensor_parallel() -> nn.Module:
    model, mesh = Net(), _mesh()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded() -> nn.Module:
    model, mesh = Net(), _mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Sum(torch.autograd.Function):
    """Sums over ranks; its gradient does as well."""

    @staticmethod
    def forward(ctx: Any, x: Value) -> Value:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Value) -> Value:
        gradient = gradient.clone()
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)
        return gradient


class Summed(nn.Module):
    """A layer whose output is summed over ranks; tanh keeps it, so checkpointing sums again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Value) -> Value:
        return torch.tanh(Sum.apply(self.layer(x)))


class ByHand(nn.Module):
    """Summed twice, the second time under checkpointing; every gradient is averaged by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.again = Summed(), Summed()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_average)

    def forward(self, x: Value) -> Value:
        return checkpoint(self.again, self.plain(x), use_reentrant=False)


def _average(parameter: Value) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, async_op=True).wait()


class Stepping(torch.optim.SGD):
    """An optimizer that issues a collective of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return super().step(closure)


def loop(make: Callable[[], nn.Module], seen: list[bool]) -> Any:
    """Train a few steps; note in each, behind its backward, whether something stands on torch."""
    model, plain = make(), on_torch()
    kind = Stepping if isinstance(model, ByHand) else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        seen.append(False)
        loss = model(torch.randn(2, 4, generator=generator)).square().sum()
        loss.backward()
        seen[-1] = is_watched(plain)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        losses.append(shown)
    return model, losses


def is_watched(plain: dict[str, Any]) -> bool:
    return any(plain[name] is not value for name, value in on_torch().items())


PROGRAMS = {f.__name__: f for f in (tensor_parallel, sharded, ByHand)}


def hold(folder: str, name: str, steps: str) -> tuple[list[bool], bool]:
    """Hold a loop, traced, to itself untraced; return in which steps something stood on torch's
    classes, and whether something still does.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    plain = numbers_of(loop, PROGRAMS[name], [])
    before, seen = on_torch(), list[bool]()
    torch.manual_seed(3)
    with rankscope.trace(out=Path(folder), steps=steps):
        traced = numbers_of(loop, PROGRAMS[name], seen)
    assert not differences(plain, traced), "\n".join(differences(plain, traced))
    return seen, is_watched(before)


# ---------------------------------------------------------------- compiled, and stuck


class Compiled(nn.Module):
    """A functional collective among other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Value) -> Value:
        import torch.distributed._functional_collectives as funcol

        return funcol.all_reduce(self.layer(x), "sum", dist.group.WORLD).relu() + 1


def run_compiled(folder: str) -> tuple[list[int], list[str]]:
    """Return how many graphs were compiled by the end of each step, one traced in their middle, and
    the operations of the first.
    """
    warnings.simplefilter("ignore")
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch.manual_seed(1)
    model = Compiled()
    compiled = torch.compile(model, backend=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with rankscope.trace(out=Path(folder), steps="1"):
        for _ in range(4):
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            counts.append(len(graphs))
    return counts, graphs[0]


class Stuck(nn.Module):
    """Rank 0 waits in a sum that the other never joins."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.folder = folder

    def forward(self, x: Value) -> Value:
        x = self.layer(x)
        dist.all_reduce(x.clone())
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        (self.folder / f"left{dist.get_rank()}").touch()
        while dist.get_rank():
            time.sleep(0.05)
        return x


def run_stuck(folder: str) -> None:
    place = Path(folder)
    with rankscope.trace(out=place / "trace", steps="all", spool=place / "spool"), torch.no_grad():
        Stuck(place)(torch.ones(2, 4))


class Swapped(nn.Module):
    """Rank 0 sums what the other broadcasts, in tensors of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Value, group: dist.ProcessGroup) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(8), group=group)
            dist.broadcast(torch.ones(2), src=0, group=group)
        else:
            dist.broadcast(torch.ones(2), src=0, group=group)
            dist.all_reduce(torch.ones(8), group=group)


def run_swapped(folder: str) -> str:
    """Return how it ended for the program."""
    group = dist.new_group(timeout=timedelta(seconds=2))  # what one rank waits for never comes
    try:
        with rankscope.trace(out=Path(folder) / "trace", steps="all"), torch.no_grad():
            Swapped()(torch.ones(2, 4), group)
    except RuntimeError as error:
        return str(error)
    return ""
