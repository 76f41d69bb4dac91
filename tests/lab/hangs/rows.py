"""The jobs of the board: what each rank does, and which ranks are missing in the end.

Each is the same little training on every rank but for the mistake. `missing` is what a person would
say who has read the program: the ranks that did not do what the others did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """One job."""

    name: str
    about: str
    program: Callable[[int], None]
    missing: tuple[int, ...]
    """() for a job that is no hang."""
    ranks: int = 2
    is_killed: bool = False
    """Killed while it stands, as a launcher does it; else its ranks raise a timeout."""
    steps: str = "all"
    """Of `--rs-steps`."""
    or_missing: tuple[int, ...] = ()
    """Named as well, where the trace cannot tell the two apart."""
    evidence: tuple[str, ...] = ()
    """Words that the message has to hold."""


class Block(nn.Module):
    """Half a transformer's layer."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(self.norm(x)))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(norm=norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == left_out else block(x)
        return self.head(x)


def rows(rank: int, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randn(4, WIDTH, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


# ---- DDP, whose reducer leaves no record ---------------------------------------------------------


def ddp_backward_left_out(rank: int) -> None:
    """Rank 1 goes on to the next batch where there is nothing to learn from."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(rows(rank, step)).pow(2).mean()
        if rank == 1 and step == 1:
            continue
        loss.backward()
        optimizer.step()
    dist.barrier()


def ddp_backward_left_out_and_stepped(rank: int) -> None:
    """Rank 2 leaves a backward out and steps with no gradient: steps are numbered alike."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(rows(rank, step)).pow(2).mean()
        if rank != 2 or step != 1:
            loss.backward()
        optimizer.step()
    dist.barrier()


def ddp_fewer_batches(rank: int) -> None:
    """Rank 0's loader ends one batch before the other's."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(3 if rank == 0 else 4):
        one_step(model, optimizer, rows(rank, step))
    dist.barrier()


def ddp_fewer_batches_and_leaves(rank: int) -> None:
    """Rank 2 has fewer batches, and ends in order."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(2 if rank == 2 else 4):
        one_step(model, optimizer, rows(rank, step))


def ddp_stops_early(rank: int) -> None:
    """Ranks 1 and 2 stop by a loss of their own, and evaluate."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(4):
        if rank in (1, 2) and step == 2:
            break
        one_step(model, optimizer, rows(rank, step))
    total = model.module(rows(rank, 9)).sum().detach()
    dist.all_reduce(total)


def ddp_batch_left_out_with_buffers(rank: int) -> None:
    """Rank 1 leaves a batch out whole: its peer waits where buffers are sent round."""
    model = DDP(Net(norm=True))
    optimizer = sgd(model)
    for step in range(4):
        if rank == 1 and step == 2:
            continue
        one_step(model, optimizer, rows(rank, step))
    dist.barrier()


def ddp_never_synchronizes(rank: int) -> None:
    """Rank 0 counts the micro-batches of a step from one, so that none is the last."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            is_last = part == 1 and not (rank == 0 and step == 1)
            model.require_backward_grad_sync = is_last
            model(rows(rank, step, part)).pow(2).mean().backward()
        optimizer.step()
    dist.barrier()


def ddp_fewer_parts(rank: int) -> None:
    """Rank 1 has one micro-batch less in a step, and each is reduced."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(1 if rank == 1 and step == 1 else 2):
            model(rows(rank, step, part)).pow(2).mean().backward()
        optimizer.step()
    dist.barrier()


def ddp_in_untraced_steps(rank: int) -> None:
    """The traced steps are alike, and behind them rank 1 leaves its training: nobody can know."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(4 if rank == 1 else 6):
        one_step(model, optimizer, rows(rank, step))
    if rank == 1:
        dist.barrier()


# ---- FSDP2 ---------------------------------------------------------------------------------------


def fsdp2_model() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def fsdp2_backward_left_out(rank: int) -> None:
    """Rank 1 leaves a backward out where there is nothing to learn from."""
    model = fsdp2_model()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(rows(rank, step)).pow(2).mean()
        if rank == 1 and step == 1:
            continue
        loss.backward()
        optimizer.step()
    dist.barrier()


def fsdp2_fewer_batches(rank: int) -> None:
    """Rank 0's loader ends one batch before the others', and it waits for them elsewhere."""
    others = dist.new_group()
    model = fsdp2_model()
    optimizer = sgd(model)
    for step in range(2 if rank == 0 else 3):
        one_step(model, optimizer, rows(rank, step))
    dist.barrier(others)


def fsdp2_layer_left_out(rank: int) -> None:
    """Rank 1 leaves a layer out in one step: it neither gathers nor reduces its parameters."""
    model = fsdp2_model()
    optimizer = sgd(model)
    for step in range(3):
        left_out = 0 if rank == 1 and step == 1 else -1
        optimizer.zero_grad()
        model(rows(rank, step), left_out=left_out).pow(2).mean().backward()
        optimizer.step()
    dist.barrier()


def fsdp2_saved_on_one_rank(rank: int) -> None:
    """Rank 0 alone puts the parameters together behind the last step, to save them."""
    others = dist.new_group()
    model = fsdp2_model()
    optimizer = sgd(model)
    for step in range(3):
        one_step(model, optimizer, rows(rank, step))
    if rank == 0:
        for parameter in model.parameters():
            parameter.full_tensor()
    dist.barrier(others)


# ---- pipelines by hand ---------------------------------------------------------------------------


class Stage(nn.Module):
    """A part of a model."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


def _pipeline(rank: int, is_done: Callable[[int, int, str], bool]) -> None:
    """Three micro-batches a step, all forwards before all backwards; `is_done(step, part, way)`
    says whether this rank does its part."""
    world, stage = dist.get_world_size(), Stage(rank)
    optimizer = sgd(stage)
    for step in range(3):
        optimizer.zero_grad()
        kept: list[tuple[Tensor, Tensor]] = []
        for part in range(3):
            if not is_done(step, part, "forward"):
                continue
            x = rows(0, step, part)
            if rank:
                dist.recv(x, rank - 1)
            x.requires_grad_(rank > 0)
            kept.append((x, stage(x)))
            if rank < world - 1:
                dist.send(kept[-1][1].detach(), rank + 1)
        for part, (x, out) in enumerate(kept):
            gradient = torch.empty_like(out)
            if rank < world - 1:
                dist.recv(gradient, rank + 1)
                out.backward(gradient)
            else:
                out.pow(2).mean().backward()
            if rank and is_done(step, part, "backward"):
                dist.send(x.grad, rank - 1)
        optimizer.step()
    dist.barrier()


def pipeline_fewer_sent(rank: int) -> None:
    """Stage 0 has one micro-batch less."""
    _pipeline(rank, lambda step, part, way: (rank, step, part) != (0, 1, 2))


def pipeline_gradient_left_out(rank: int) -> None:
    """The last stage sends no gradient for one micro-batch."""
    _pipeline(rank, lambda step, part, way: (rank, step, part, way) != (1, 1, 2, "backward"))


def pipeline_middle_drops(rank: int) -> None:
    """The middle stage leaves a micro-batch out."""
    _pipeline(rank, lambda step, part, way: (rank, step, part) != (1, 1, 2))


# ---- collectives of the program ------------------------------------------------------------------


def metric_on_others(rank: int) -> None:
    """All but rank 1 add up a metric."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(3):
        one_step(model, optimizer, rows(rank, step))
        total = torch.ones(1)
        if not (rank == 1 and step == 1):
            dist.all_reduce(total)
    dist.barrier()


class Corrected(nn.Module):
    """A head whose input is corrected by the mean of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, is_corrected: bool) -> Tensor:
        x = self.fc(x)
        if is_corrected:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            x = x - mean / dist.get_world_size()
        return self.head(x)


def branch_left_out(rank: int) -> None:
    """A branch with a collective depends on the values of rank 2."""
    model = Corrected()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(rank, step), not (rank == 2 and step == 1)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.barrier()


def barrier_of_one(rank: int) -> None:
    """Rank 0 waits for the others behind its checkpoint, and they have gone on. Its records are
    those of a rank whose data has ended: whether a barrier stands in the loop, only code tells."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(3):
        one_step(model, optimizer, rows(rank, step))
        if rank == 0 and step == 1:
            dist.barrier()


# ---- no hang -------------------------------------------------------------------------------------


def slow_rank(rank: int) -> None:
    """Rank 1 reads its second batch for long, and all end."""
    model = DDP(Net())
    optimizer = sgd(model)
    for step in range(3):
        if rank == 1 and step == 1:
            time.sleep(2.0)
        one_step(model, optimizer, rows(rank, step))
    dist.barrier()


def slow_stage(rank: int) -> None:
    """A stage is slow in each micro-batch, and all end."""

    def is_done(step: int, part: int, way: str) -> bool:
        time.sleep(0.3 * (rank == 1 and step == 1))
        return True

    _pipeline(rank, is_done)


ROWS = (
    Hang(name="ddp-backward-left-out", about="DDP: a rank has a forward without a backward",
         program=ddp_backward_left_out, missing=(1,)),
    Hang(name="ddp-backward-left-out-late", about="the same, in a step that is not traced",
         program=ddp_backward_left_out, missing=(1,), steps="0-1"),
    Hang(name="ddp-backward-left-out-and-stepped", about="the same, and its optimizer steps",
         program=ddp_backward_left_out_and_stepped, missing=(2,), ranks=3),
    Hang(name="ddp-fewer-batches", about="DDP: one rank's data ends before the other's",
         program=ddp_fewer_batches, missing=(0,)),
    Hang(name="ddp-fewer-batches-killed", about="the same, killed while it stands",
         program=ddp_fewer_batches, missing=(0,), is_killed=True),
    Hang(name="ddp-fewer-batches-and-leaves", about="DDP: a rank has fewer batches and ends",
         program=ddp_fewer_batches_and_leaves, missing=(2,), ranks=3),
    Hang(name="ddp-stops-early", about="DDP: two ranks stop by their own loss and evaluate",
         program=ddp_stops_early, missing=(1, 2), ranks=4, is_killed=True),
    Hang(name="ddp-batch-left-out-with-buffers", about="DDP with buffers: a batch is left out",
         program=ddp_batch_left_out_with_buffers, missing=(1,)),
    Hang(name="ddp-never-synchronizes", about="DDP: a rank stays in no_sync() for a step",
         program=ddp_never_synchronizes, missing=(0,)),
    Hang(name="ddp-fewer-parts", about="DDP: a rank has one micro-batch less in a step",
         program=ddp_fewer_parts, missing=(1,), is_killed=True),
    Hang(name="ddp-in-untraced-steps", about="DDP: a rank stops behind the traced steps",
         program=ddp_in_untraced_steps, missing=(0, 1), steps="0-1", evidence=("rows.py:",)),
    Hang(name="fsdp2-backward-left-out", about="FSDP2: a rank has a forward without a backward",
         program=fsdp2_backward_left_out, missing=(1,)),
    Hang(name="fsdp2-fewer-batches", about="FSDP2: one rank's data ends before the others'",
         program=fsdp2_fewer_batches, missing=(0,), ranks=3, is_killed=True),
    Hang(name="fsdp2-layer-left-out", about="FSDP2: a rank leaves a layer out in one step",
         program=fsdp2_layer_left_out, missing=(1,)),
    Hang(name="fsdp2-saved-on-one-rank", about="FSDP2: one rank alone gathers the parameters",
         program=fsdp2_saved_on_one_rank, missing=(1,)),
    Hang(name="pipeline-fewer-sent", about="pipeline: the first stage has one micro-batch less",
         program=pipeline_fewer_sent, missing=(0,)),
    Hang(name="pipeline-gradient-left-out", about="pipeline: a gradient is not sent back",
         program=pipeline_gradient_left_out, missing=(1,), is_killed=True),
    Hang(name="pipeline-middle-drops", about="pipeline: the middle stage drops a micro-batch",
         program=pipeline_middle_drops, missing=(1,), ranks=3),
    Hang(name="metric-on-others", about="a rank adds up no metric",
         program=metric_on_others, missing=(1,), ranks=3),
    Hang(name="branch-left-out", about="a branch with a collective depends on a rank's values",
         program=branch_left_out, missing=(2,), ranks=3, is_killed=True),
    Hang(name="barrier-of-one", about="one rank alone comes to a barrier",
         program=barrier_of_one, missing=(1,), or_missing=(0,)),
    Hang(name="slow-rank", about="a rank is slow, and all end", program=slow_rank, missing=()),
    Hang(name="slow-stage", about="a stage is slow, and all end", program=slow_stage,
         missing=(), ranks=3),
)  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
