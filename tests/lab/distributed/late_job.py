"""One small model, trained on two ranks of the late accelerator or of the CPU, plain and traced.

rankscope run --nproc-per-node 2 tests/lab/distributed/late_job.py ddp late
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope.capture.device.devicedigester import DeviceDigester
from tests.lab import lateaccelerator
from tests.lab.lateaccelerator.streams import Synchronization, work
from tests.unharmed import differences, numbers_of

STEPS = 2
WORDS, WIDTH = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """What a transformer has around its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(1))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Exchanging(nn.Module):
    """Collectives in flight, of both kinds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.detach().clone()
        pending = dist.all_reduce(own, async_op=True)
        summed = funcol.all_reduce(x.detach(), "sum", dist.group.WORLD)
        pending.wait()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return x + 0.1 * (own + summed + parts[0])


class Beside(nn.Module):
    """A layer whose work runs on a stream of its own, where it also is digested."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return x + self.inner(x)
        main, side = torch.late.current_stream(), torch.late.Stream()
        side.wait_stream(main)
        with torch.late.stream(side):
            y = self.inner(x.detach())
        main.wait_stream(side)
        y.record_stream(main)
        return x + y


class Wide(nn.Module):
    """What makes streams, random numbers and memory matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH))
        self.exchanging = Exchanging()
        self.beside = Beside()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.head(self.beside(self.exchanging(x)))


def train_wide() -> tuple[Any, list[Synchronization]]:
    """Train one step with accumulation and clipping, and evaluate without gradients."""
    torch.manual_seed(7)
    net = Wide().to("late")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(4, WIDTH).to("late") for _ in range(2)]
    begin, losses = len(work.synchronizations), []
    for x in batches:
        loss = net(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        losses.append(net(batches[0]).sum())
    with torch.inference_mode():
        losses.append(net(batches[1]).sum())
    waits = work.synchronizations[begin:]
    return ([loss.item() for loss in losses], _on_host(net), _on_host(optimizer)), waits


def batch(step: int, *, is_split: bool) -> torch.Tensor:
    """Return the words of one step, on the host: of each rank its own, or of all the same."""
    seed = 100 * step + (dist.get_rank() if is_split else 0)
    return torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(seed))


def train(kind: str, device: str, fault: str = "") -> tuple[Any, list[Synchronization]]:
    """Train the model.

    Args:
        kind: "ddp", "tp", "fsdp", or "wide" for `train_wide`.
        device: "late" or "cpu".
        fault: "" or, at the start of step 1, "weight": rank 1's weight of one layer is another;
            "index": the device fails with an index that is too large.

    Returns:
        What counts of the training, and who waited for the device between the first forward and
        the last optimizer step; on the CPU nobody.
    """
    if kind == "wide":
        return train_wide()
    torch.manual_seed(7)
    net = Net().to(device)
    is_data_parallel = kind == "ddp"
    model: nn.Module = net
    if is_data_parallel:
        model = DistributedDataParallel(net)
    elif kind == "fsdp":
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("fsdp",))
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh)
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))
        for layer in net.layers:
            parallelize_module(layer, mesh, plan)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=is_data_parallel)
    batches = [batch(step, is_split=kind != "tp") for step in range(STEPS)]
    words = [each.to(device) for each in batches]
    begin, losses = len(work.synchronizations), []
    for step in range(STEPS):
        if fault == "index" and step:
            words[step] += WORDS
        if fault == "weight" and step and dist.get_rank():
            with torch.no_grad():
                net.head.weight.add_(0.5)
        logits = model(words[step])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[step].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if fault == "index":
            loss.item()  # as most programs do: the device has come as far as the host
    waits = work.synchronizations[begin:]
    return ([loss.item() for loss in losses], _on_host(net), _on_host(optimizer)), waits


def _on_host(found: nn.Module | torch.optim.Optimizer) -> Any:
    state = found.state_dict()
    return {
        name: getattr(tensor, "_local_tensor", tensor).cpu() for name, tensor in _tensors("", state)
    }


def _tensors(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each)


def own_group(device: str) -> None:
    """Change the pool's group of gloo for one of the device."""
    lateaccelerator.install()  # on the CPU too: behind a first backward it is too late for it
    if device == "late":
        store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("late", store=store, rank=rank, world_size=size)


def run(kind: str, device: str, tensors: str, out: str) -> Any:
    """Train plain, then traced into `out`.

    Returns:
        What differs between the two, who waited plain, and who waited traced.
    """
    own_group(device)
    plain, waits = train(kind, device)
    with rankscope.trace(out=out, steps="all", tensors=tensors):
        traced, traced_waits = train(kind, device)
    return differences(numbers_of(lambda: plain), numbers_of(lambda: traced)), waits, traced_waits


def run_faulty(kind: str, device: str, out: str) -> None:
    """Train traced, with a weight that leaves its replica on rank 1 in step 1."""
    own_group(device)
    with rankscope.trace(out=out, steps="all"):
        train(kind, device, fault="weight")


def run_broken(out: str) -> str:
    """Train traced until the device fails; return what the program is told."""
    own_group("late")
    try:
        with rankscope.trace(out=out, steps="all"):
            train("ddp", "late", fault="index")
    except RuntimeError as error:
        return str(error)
    finally:
        work.error = None
    return ""


def run_wrong(wrong: Callable[[torch.Tensor], object], out: str) -> Any:
    """Do as `run`, with a digest that does a thing more to each value."""
    read = DeviceDigester.read

    def wrong_read(self: DeviceDigester, local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wrong(local)
        return read(self, local, *args, **kwargs)

    DeviceDigester.read = wrong_read  # type: ignore[method-assign]  # the rank that is to be caught
    try:
        return run("ddp", "late", "", out)
    finally:
        DeviceDigester.read = read  # type: ignore[method-assign]


if __name__ == "__main__":
    kind, device = sys.argv[1:3]
    if device == "late":
        lateaccelerator.install()
    dist.init_process_group("gloo" if device == "cpu" else "late")
    print(*[f"loss {loss!r}" for loss in train(kind, device)[0][0]], sep="\n")
    dist.destroy_process_group()
