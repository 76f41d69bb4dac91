"""Training jobs that are held to a run of one process, right and with one fault each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankscope
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool
from tests.lab.faults.model import batch, loss_of, whole
from tests.lab.faults.parallel import Leave
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.tensor import cut_by_hand, one_step
from tests.lab.faults.setup import Setup, Trained, train

Change = Callable[[nn.Module], None]


def one_process(setup: Setup, fault: str, out: str) -> None:
    """Train the whole model on the whole batch. `fault`: the name of a function below, "perturbed"
    for none in a run that measures noise, or ""."""
    warnings.simplefilter("ignore")
    model = whole(setup)
    if fault in CHANGES:
        CHANGES[fault](model)
    times = 3.0 if fault == "loss_scaled" else 1.0

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step)
        if fault == "other_rows":
            tokens, targets = batch(setup, step + 50)
        if fault == "rows_turned":
            tokens, targets = tokens.flip(0), targets.flip(0)
        loss = loss_of(model(tokens), targets)
        (loss * times).backward()
        return loss

    with rankscope.trace(out=out, steps="all", perturb=int(fault == "perturbed")):
        train(Trained(model), sgd(model), one)


def wrong_epsilon(model: nn.Module) -> None:
    """A norm of a port has another constant."""
    model.layers["1"].attention_norm.eps = 1e-4


def transposed_weight(model: nn.Module) -> None:
    """A square weight was loaded the other way round."""
    with torch.no_grad():
        weight = model.layers["1"].attention.v_proj.weight
        weight.copy_(weight.t().clone())


def positions_turned(model: nn.Module) -> None:
    """Every token is told the position of another one."""
    model.positions.register_forward_pre_hook(lambda _, given: (given[0].flip(0),))


def small_epsilon(model: nn.Module) -> None:
    """The same by so little that the tolerance of the dtype explains it."""
    model.layers["1"].attention_norm.eps = 3e-6


CHANGES: dict[str, Change] = {
    "wrong_epsilon": wrong_epsilon,
    "transposed_weight": transposed_weight,
    "positions_turned": positions_turned,
    "small_epsilon": small_epsilon,
}


class Halved(torch.autograd.Function):
    """Out of a split region, averaged over the group where a sum belongs."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return Leave.forward(ctx, x, group) / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class AveragingRow(nn.Module):
    """The row-parallel layer with that fault."""

    def __init__(self, row: nn.Module) -> None:
        super().__init__()
        self.weight, self._group = row.weight, row._group

    def forward(self, x: Tensor) -> Tensor:
        return Halved.apply(nn.functional.linear(x, self.weight), self._group)


def averaged_reduction(setup: Setup, out: str) -> None:
    """Tensor parallelism by hand, in which one layer averages over its ranks."""
    warnings.simplefilter("ignore")
    trained = cut_by_hand(setup, dist.group.WORLD)
    attention = trained.model.layers["1"].attention
    attention.o_proj = AveragingRow(attention.o_proj)
    optimizer = sgd(trained.model)
    with rankscope.trace(out=out, steps="all"):
        train(trained, optimizer, lambda step: one_step(setup, trained.model, step))


def doubled_gradients(setup: Setup, out: str) -> None:
    """DDP whose gradients are added over ranks and not averaged."""
    warnings.simplefilter("ignore")
    model = whole(setup)
    wrapped = DDP(model)

    def summed(_, bucket):  # annotations as text are refused
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, summed)

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        loss = loss_of(wrapped(tokens), targets)
        loss.backward()
        return loss

    with rankscope.trace(out=out, steps="all"):
        train(Trained(model), sgd(model), one)


def traced_alone(pool: RankPool, setup: Setup, folder: Path, fault: str = "") -> Path:
    """Run `one_process` and return its trace."""
    out = folder / "trace"
    pool.run(one_process, setup, fault, str(out), world_size=1)
    return out


def traced_together(pool: RankPool, job: Callable[..., None], setup: Setup, folder: Path) -> Path:
    """Run a job on the ranks of its setup and return the trace."""
    return traced(pool, job, setup, folder=folder, world=setup.ranks)
