"""Right programs of usual kinds, in which nothing is wrong: no fault, and no warning."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.record.finding import Verdict
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool


def rows(step: int, *shape: int, rank: int | None = None) -> Tensor:
    """Return the rows of a rank in a step."""
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small(width: int = 6) -> DistributedDataParallel:
    """Return a small model in DDP; ranks drop out for themselves."""
    torch.manual_seed(0)
    layers = nn.Linear(width, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4)
    model = DistributedDataParallel(nn.Sequential(*layers))
    torch.manual_seed(dist.get_rank())
    return model


def train(
    out: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    behind: Callable[[int], object] = lambda step: None,
    width: int = 6,
) -> None:
    """Train on rows of this rank, and do something behind each step."""
    with rankscope.trace(out=out, steps="all"):
        for step in range(steps):
            optimizer.zero_grad()
            model(rows(step, 4, width)).square().mean().backward()
            optimizer.step()
            behind(step)


def sharded_optimizer(out: str) -> None:
    """Each rank steps its part of the parameters, and sends it."""
    model = small()
    train(out, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def half_gradients(out: str) -> None:
    """Gradients are reduced in half precision."""
    model = small()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(out, model, torch.optim.SGD(model.parameters(), 0.1))


def low_rank_gradients(out: str) -> None:
    """Gradients are reduced as products of thin matrices, from the third step on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(32, 32))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(out, model, torch.optim.SGD(model.parameters(), 0.1), 4, width=32)


def uneven_inputs(out: str) -> None:
    """Rank 1 has a batch more, `Join` shadows it on rank 0."""
    model = small()
    with Join([model]):
        steps = 3 + dist.get_rank()
        train(out, model, torch.optim.SGD(model.parameters(), 0.1), steps)


def average_on_one_rank(out: str) -> None:
    """Rank 0 alone keeps a moving average, and judges it."""
    model = small()
    slow = deepcopy(model.module).requires_grad_(False).eval() if dist.get_rank() == 0 else None

    def behind(step: int) -> None:
        if slow is not None:
            with torch.no_grad():
                for mean, now in zip(slow.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 0.5)
                slow(rows(step, 4, 6, rank=50))
        dist.barrier()

    train(out, model, torch.optim.SGD(model.parameters(), 0.1), 4, behind)


def validation_on_one_rank(out: str) -> None:
    """Batch norm is frozen on all ranks; rank 0 validates in eval mode, and goes back."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)
    model = DistributedDataParallel(nn.Sequential(*layers))
    model.module[1].eval()

    def behind(step: int) -> None:
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model.module(rows(step, 3, 6))
            model.train()
            model.module[1].eval()
        dist.barrier()

    train(out, model, torch.optim.SGD(model.parameters(), 0.1), 4, behind)


class Model(nn.Module):
    """Token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.norm, self.last_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        """Map `[rows, length]` to `[rows, length, 16]`."""
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.last_norm(x))


def on_tokens(out: str, model: nn.Module, place: int) -> None:
    """Train on the tokens of a data-parallel place."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + place)
            ids = torch.randint(16, (4, 8), generator=generator)
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def sequence_parallel(out: str) -> None:
    """torchtitan's plan over two ranks, with FSDP2 on four."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    cut = Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=cut),
        "down": RowwiseParallel(output_layouts=cut),
        "last_norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    if world > 2:
        fully_shard(model, mesh=mesh["dp"])
    on_tokens(out, model, mesh.get_local_rank("dp"))


def hybrid_shards(out: str) -> None:
    """FSDP2 over one axis, replicas over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    fully_shard(model, mesh=mesh)
    on_tokens(out, model, dist.get_rank())


class Mixture(nn.Module):
    """One expert on each rank, under one name, for the rows of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        torch.manual_seed(5 + dist.get_rank())
        self.experts = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, 6]` to `[rows, 2]`."""
        x = self.first(x)
        weights = self.gate(x).softmax(-1)
        made = all_gather(self.experts[0](torch.cat(list(all_gather(x)))))
        parts = [part.chunk(2)[dist.get_rank()] for part in made]
        return self.last(sum(weights[:, i : i + 1] * part for i, part in enumerate(parts)))


def mixture(out: str) -> None:
    """Gradients of what ranks share are averaged by hand, those of experts divided."""
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankscope.trace(model, out=out, steps="all"):
        for step in range(3):
            optimizer.zero_grad()
            model(rows(step, 4, 6)).square().mean().backward()
            for name, parameter in model.named_parameters():
                if "experts" not in name:
                    dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()


JOBS = (
    (sharded_optimizer, 2),
    (half_gradients, 2),
    (low_rank_gradients, 2),
    (uneven_inputs, 2),
    (average_on_one_rank, 2),
    (validation_on_one_rank, 2),
    (sequence_parallel, 2),
    (sequence_parallel, 4),
    (hybrid_shards, 4),
    (mixture, 2),
)


@pytest.mark.parametrize(("job", "world"), JOBS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_right_program_has_no_finding(
    ranks: RankPool, tmp_path: Path, job: Callable[[str], None], world: int
) -> None:
    report = report_of(ranks, job, folder=tmp_path, world=world)
    assert report.verdict is Verdict.CLEAN
    assert [finding.message for finding in report.findings] == []
