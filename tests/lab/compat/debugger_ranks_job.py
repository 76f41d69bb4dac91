"""What two ranks run under the debugger: each kind of parallelism, and what each rank computed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.compat import model_addition_debugger_context

WIDTH, HIDDEN = 6, 16


class Net(nn.Module):
    """Two layers and what stands between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.Tanh()

    def forward(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        x = self.act(self.up(x))
        if fails:
            raise ValueError("stumbled")
        return self.out(self.down(x))


class Stage(nn.Module):
    """One half of the layers: what a rank of a pipeline holds."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(20 + number)
        self.layers = nn.ModuleDict({f"{number}": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def net() -> Net:
    torch.manual_seed(11)
    return Net()


def batch(place: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(place))


def debugged(kind: str, folder: str, flags: dict[str, Any]) -> list[float]:
    """Run one forward; returns the mean of what `up` was given and gave on this rank."""
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    model: nn.Module = net()
    given = batch(0 if kind.startswith("tp") else rank)
    if kind.startswith("tp"):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, plan)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    seen: list[float] = []
    own = model.module if kind == "ddp" else model
    own.up.register_forward_hook(
        lambda module, args, output: seen.extend(
            float(_local(t).float().mean()) for t in (args[0], output)
        )
    )
    with model_addition_debugger_context(model, debug_path=folder, **flags):
        output = model(given)
    assert output.requires_grad is (flags.get("no_grad") is False)
    if output.requires_grad:
        output.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    return seen


def split_by_transformers(saved: str, folder: str, trains: bool) -> dict[str, list[int]]:
    """Load a saved model as transformers shards it over all ranks, and run it; returns the shape
    of what each module handed out on this rank.
    """
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved, tp_plan="auto")
    shapes: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if not [*module.children()]:
            module.register_forward_hook(
                lambda _m, _a, output, name=name: shapes.update({name: list(output.shape)})
                if isinstance(output, torch.Tensor) else None
            )  # fmt: skip
    with model_addition_debugger_context(model, folder, ranks="all", no_grad=not trains):
        model(torch.arange(3, 11)[None], use_cache=False)
    return shapes


def seen_both_ways(saved: str, folder: str) -> None:
    """Run a model that transformers shards under the debugger, and once more traced."""
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved, tp_plan="auto")
    tokens = torch.arange(3, 11)[None]
    with model_addition_debugger_context(model, f"{folder}/alone", ranks="all", use_repr=False):
        model(tokens, use_cache=False)
    out = Path(folder, "trace")
    with rankscope.trace(model, out=out, steps="all", tensors="**"), torch.no_grad():
        model(tokens, use_cache=False)


def sharded_without_a_sharded_value(folder: str) -> None:
    """Weights lie on a mesh, and the forward takes their local parts by hand: no value says so."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = ByHand(mesh)
    with model_addition_debugger_context(model, folder, ranks="all"):
        model(batch(0))


class ByHand(nn.Module):
    """Computes with the local parts of sharded weights, in a module of its own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = Inner(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Inner(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        whole = net().up.weight.detach()
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to_local().T  # type: ignore[attr-defined]  # a DTensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def piped(folder: str) -> tuple[float, float]:
    """Two stages, two micro-batches; returns the means of both outputs of this rank's stage."""
    rank = dist.get_rank()
    model = Stage(rank)
    made: list[float] = []
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), input_args=(batch(9)[:2],))
    schedule = ScheduleGPipe(stage, 2)
    handle = model.register_forward_hook(lambda m, a, out: made.append(float(out.detach().mean())))
    with model_addition_debugger_context(model, folder, ranks="all", no_grad=False):
        schedule.step(batch(9)) if rank == 0 else schedule.step()
    handle.remove()
    return made[-2], made[-1]


def one_rank_fails(folder: str) -> None:
    rank = dist.get_rank()
    model = net()
    try:
        with model_addition_debugger_context(model, folder, ranks="all"):
            model(batch(rank), fails=rank == 1)
    except ValueError:
        assert rank == 1


def only_the_first_enters(folder: str) -> bool:
    """No other rank is waited for."""
    model = net()
    if dist.get_rank() == 0:
        with model_addition_debugger_context(model, folder):
            model(batch(0))
    else:
        model(batch(1))
    dist.barrier()
    return [*Path(folder).iterdir()] != []


class Asking(nn.Module):
    """Hands an object on whose repr is a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, asked: object) -> torch.Tensor:
        return self.net.up(x)


class Collective:
    def __repr__(self) -> str:
        dist.barrier()
        return "all have arrived"


def repr_of_a_collective(folder: str, ranks: Any) -> None:
    model = Asking()
    with model_addition_debugger_context(model, folder, ranks=ranks):
        model(batch(0), Collective())
    dist.barrier()
