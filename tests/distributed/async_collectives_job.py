"""Collectives in flight inside a traced forward, while the peer has not even joined them.

Rank 1 enters its forward only after rank 0 has left its own: whoever waits for the collective
before that, tracing included, waits for ever.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import rankscope
from tests.unharmed import differences, numbers_of

Value = torch.Tensor


def all_reduce(x: Value) -> Value:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def all_gather(x: Value) -> Value:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD)


def reduce_scatter(x: Value) -> Value:
    return funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def redistributed(x: Value) -> Value:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Replicate()], async_op=True)


def gathered_shards(x: Value) -> Value:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return whole.redistribute(placements=[Replicate()], async_op=True)


COLLECTIVES: dict[str, Callable[[Value], Value]] = {
    f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, redistributed, gathered_shards)
}


class Starts(nn.Module):
    """Starts a collective and hands out what it is still writing."""

    def __init__(self, collective: Callable[[Value], Value]) -> None:
        super().__init__()
        self.collective = collective

    def forward(self, x: Value) -> Value:
        return self.collective(x)


class Uses(nn.Module):
    """Reads the result, which waits for it."""

    def forward(self, x: Value) -> Value:
        return x * 2


class Net(nn.Module):
    """A module between the start of the collective and its use."""

    def __init__(self, collective: Callable[[Value], Value], gate: Path) -> None:
        super().__init__()
        self.starts, self.meanwhile, self.uses = Starts(collective), nn.Linear(4, 4), Uses()
        self.gate = gate

    def forward(self, x: Value, *, is_used: bool) -> Value:
        if dist.get_rank() == 1:
            wait_for(self.gate)
        started = self.starts(x)
        self.meanwhile(x)
        if dist.get_rank() == 0:
            self.gate.touch()
        if not is_used:  # nobody waits inside the step
            return started
        return self.uses(started)


def wait_for(gate: Path) -> None:
    for _ in range(6000):
        if gate.exists():
            return
        time.sleep(0.01)
    raise AssertionError("rank 0 never left the module that started the collective")


def run(folder: str, name: str, waits: str) -> list[float]:
    """Start one collective under a trace, and wait for it "in" the model, "after" it, or after the
    "trace"; hold the result to an untraced run and return its elements.
    """
    warnings.simplefilter("ignore")
    place = Path(folder)
    plain = numbers_of(lambda: finished(started(name, waits, place), place))
    with rankscope.trace(out=place / "trace", steps="all", tensors="**"):
        out = started(name, waits, place)
        if waits != "trace":
            out = finished(out, place)
    result = finished(out, place)
    assert not differences(plain, numbers_of(lambda: result)), "tracing changed the result"
    return result.flatten().tolist()


def started(name: str, waits: str, folder: Path) -> Value:
    x = torch.arange(16.0).reshape(4, 4) + dist.get_rank()
    model = Net(COLLECTIVES[name], folder / "gate")
    with torch.no_grad():
        return model(x, is_used=waits == "in")


def finished(out: Value, folder: Path) -> Value:
    """Wait for a value, and close the gate for the next run."""
    result = (out.to_local() if isinstance(out, DTensor) else out) + 0
    dist.barrier()
    (folder / "gate").unlink(missing_ok=True)
    dist.barrier()
    return result


def run_plain_tensor(folder: str) -> list[float]:
    """`dist.all_reduce(async_op=True)` on a plain tensor, waited for after the module has ended."""
    warnings.simplefilter("ignore")
    place = Path(folder)

    def body() -> Value:
        works: list[Any] = []

        def start(x: Value) -> Value:
            works.append(dist.all_reduce(x, async_op=True))
            return x

        model = Net(start, place / "gate")
        x = torch.arange(16.0).reshape(4, 4) + dist.get_rank()
        with torch.no_grad():
            running = model(x, is_used=False)
            works.pop().wait()
            return finished(model.uses(running), place)

    plain = numbers_of(body)
    with rankscope.trace(out=place / "trace", steps="all"):
        result = body()
    assert not differences(plain, numbers_of(lambda: result)), "tracing changed the result"
    return result.flatten().tolist()
