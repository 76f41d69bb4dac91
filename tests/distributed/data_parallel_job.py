"""Data-parallel training loops, each run plain and traced on every rank of a pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import rankscope
from tests.unharmed import differences, numbers_of

STEPS = 2
KEPT: list[nn.Module] = []
"""Kept alive until the next, as a script keeps its model: what is gone cannot be read."""


class Net(nn.Module):
    """Blocks that can be sharded one by one, and a branch not every rank takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, is_spared: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if is_spared:
            x = x + self.spare(x)
        return self.head(x)


def loss_of(model: nn.Module, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    return model(torch.randn(4, 8, generator=generator), **options).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, **options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(**options: Any) -> Callable[[], Any]:
    def program() -> Any:
        model = DistributedDataParallel(Net(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, train(model, optimizer, is_spared=not options)

    return program


def ddp_no_sync() -> Any:
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        with model.no_sync():
            loss_of(model, is_spared=True).backward()
        loss_of(model, is_spared=True).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


def ddp_apart() -> Any:
    """Train apart: the optimizer steps inside `no_sync`, as local SGD does between averages."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        return model, train(model, optimizer, is_spared=True)


def zero() -> Any:
    """ZeRO steps the optimizer of its own shard inside its own step."""
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return model, train(model, optimizer, is_spared=True)


def fsdp2(accumulate: bool = False, **options: Any) -> Callable[[], Any]:
    def program() -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = Net()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if not accumulate:
            return model, train(model, optimizer, is_spared=True)
        for _ in range(STEPS):
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                loss_of(model, is_spared=True).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    return program


def fsdp2_stale() -> Any:
    """The optimizer was made before `fully_shard`: nothing it holds is trained any more."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    return model, train(model, optimizer, is_spared=True)


def flat_copies() -> Any:
    """ZeRO as DeepSpeed does it: each rank steps its part of a flat copy of each group, puts it
    into its own parameters, and gathers those of the others behind the last group.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Net()
    KEPT[:] = [model]
    groups = [[p for p in model.parameters() if p.dim() == dims] for dims in (2, 1)]
    flats = [torch.cat([p.detach().reshape(-1) for p in group]) for group in groups]
    parts = [flat.tensor_split(world)[rank].clone() for flat in flats]
    optimizer = torch.optim.AdamW([{"params": [part]} for part in parts], lr=0.01)
    whole = optimizer.param_groups
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, is_spared=True)
        loss.backward()
        losses.append(loss.item())
        for group, part in zip(groups, parts, strict=True):
            flat = torch.cat([p.grad.reshape(-1) for p in group if p.grad is not None])
            dist.all_reduce(flat)
            part.grad = flat.tensor_split(world)[rank].clone() / world
        model.zero_grad()
        for number, (group, flat, part) in enumerate(zip(groups, flats, parts, strict=True)):
            optimizer.param_groups = [whole[number]]
            optimizer.step()
            flat.tensor_split(world)[rank].copy_(part)
            _put_back(group, flat)
        for group, flat in zip(groups, flats, strict=True):
            for owner, piece in enumerate(flat.tensor_split(world)):
                dist.broadcast(piece, owner)
            _put_back(group, flat)
    return model, losses


def _put_back(group: list[nn.Parameter], flat: torch.Tensor) -> None:
    for parameter, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
        parameter.data.copy_(piece.view_as(parameter))


def fsdp1(
    use_orig_params: bool, strategy: str = "FULL_SHARD", accumulate: bool = False
) -> Callable[[], Any]:
    def program() -> Any:
        model = FullyShardedDataParallel(
            Net(),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            sharding_strategy=ShardingStrategy[strategy],
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not accumulate:
            return train(model, optimizer, is_spared=True), [p.detach() for p in model.parameters()]
        for _ in range(STEPS):
            with model.no_sync():
                loss_of(model, is_spared=True).backward()
            loss_of(model, is_spared=True).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    return program


PROGRAMS: dict[str, Callable[[], Any]] = {
    "ddp": ddp(),
    "bucket views": ddp(gradient_as_bucket_view=True, find_unused_parameters=True),
    "static graph": ddp(static_graph=True),
    "no_sync": ddp_no_sync,
    "ddp apart": ddp_apart,
    "zero": zero,
    "fsdp2": fsdp2(),
    "fsdp2 kept": fsdp2(reshard_after_forward=False),
    "fsdp2 bf16": fsdp2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "fsdp2 offload": fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2 accumulation": fsdp2(accumulate=True),
    "fsdp2 stale": fsdp2_stale,
    "flat copies": flat_copies,
    "fsdp1": fsdp1(True),
    "fsdp1 flat": fsdp1(False),
    # its parameters are no leaves of the graph between a forward and the next backward
    "fsdp1 accumulation": fsdp1(True, "SHARD_GRAD_OP", accumulate=True),
}


ACCUMULATING = {"no_sync", "fsdp2 accumulation", "fsdp1 accumulation"}
GRADIENT_FLAGS = {
    "ddp apart": {"no_sync"},
    # a branch no rank took, and parameters of which the flat shard of a rank holds nothing
    "bucket views": {"absent", "structure_only"},
    "static graph": {"absent", "structure_only"},
    "fsdp1": {"absent", "structure_only"},
    "fsdp1 accumulation": {"absent", "structure_only"},
}


def run(folder: str, name: str) -> list[tuple[list[float], list[float]]]:
    """Hold one loop, traced, to itself untraced; the tree is there when every rank has ended.

    Returns:
        for every optimizer step the norms of this rank's gradients before it, and of its parameters
        after it.
    """
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", "The .grad attribute of a Tensor that is not a leaf")
    plain = numbers_of(seeded, PROGRAMS[name])
    seen: list[tuple[list[float], list[float]]] = []
    depth = [0]

    def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        depth[0] += 1
        if depth[0] == 1:
            seen.append((norms(optimizer, "grad"), []))

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        depth[0] -= 1
        if depth[0] == 0:
            seen[-1][1].extend(norms(optimizer, "data"))

    with rankscope.trace(out=Path(folder), steps="all"):
        hooks = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        traced = numbers_of(seeded, PROGRAMS[name])
        for hook in hooks:
            hook.remove()
    assert not differences(plain, traced), "\n".join(differences(plain, traced))
    return seen


def norms(optimizer: torch.optim.Optimizer, what: str) -> list[float]:
    """Return the norms of what this rank holds of an optimizer's parameters or gradients."""
    held = (getattr(p, what) for group in optimizer.param_groups for p in group["params"])
    local = (getattr(t, "_local_tensor", t) for t in held if t is not None)
    return [t.detach().double().norm().item() for t in local]


def seeded(program: Callable[[], Any]) -> Any:
    """Run a program from one random state."""
    torch.manual_seed(11)
    return program(), torch.get_rng_state()
