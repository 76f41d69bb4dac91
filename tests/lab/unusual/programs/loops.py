"""Loops with a turn of their own: micro-batches, steps left out, layers left out, evaluation."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    ROWS,
    WIDTH,
    Block,
    Net,
    average,
    backward,
    chooser,
    class_loss,
    in_one_process,
    labels,
    part,
    rows,
    sgd,
    summed,
)
from tests.lab.unusual.truths import State, state

SIZES = (1, 2, 3)


def micro_batches(setup: Setup) -> Trained:
    """Micro-batches of one, two and three rows, weighed by their rows. Mistake: all weigh alike."""
    model = filled(setup, Net)
    wrapped = DDP(model)

    def one(step: int) -> Tensor:
        x, y = (part(t, setup).split(SIZES) for t in (rows(setup, step), labels(setup, step)))
        total = torch.zeros(())
        for inputs, classes in zip(x, y):
            share = 1 / len(SIZES) if setup.is_faulty else len(inputs) / sum(SIZES)
            is_last = len(inputs) == SIZES[-1]
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                loss = backward(F.cross_entropy(wrapped(inputs), classes) * share)
            total += loss.detach()
        return total

    return train(Trained(model), sgd(model), one)


BATCHES, BAD = 4, 1


def spiky_loss(setup: Setup, model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """Return a loss that one part of one batch makes very large."""
    x, y = rows(setup, step).clone(), labels(setup, step)
    if step == BAD:
        x[-2:] *= 1000.0
    return F.cross_entropy(model(part(x, setup, rank)), part(y, setup, rank))


def agreed_skips_alone(setup: Setup) -> Trained:
    """One process that leaves out a batch with a very large loss."""
    model = filled(setup, Net)
    optimizer = sgd(model)
    trained = Trained(model)
    for step in range(BATCHES):
        loss = spiky_loss(setup, model, step)
        if loss > LARGE / 3:
            continue
        optimizer.zero_grad()
        trained.losses.append(backward(loss).detach())
        optimizer.step()
    return trained


LARGE = 10.0


def agreed_skips(setup: Setup) -> Trained:
    """If one rank's loss is very large, all leave the batch out. Mistake: one rank leaves out the
    optimizer's next step as well, as its flag is still up."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    wrapped = DDP(model)
    optimizer = sgd(model)
    trained = Trained(model)
    is_up = False
    for step in range(BATCHES):
        loss = spiky_loss(setup, wrapped, step)
        if summed((loss > LARGE).float()):
            is_up = True
            continue
        optimizer.zero_grad()
        trained.losses.append(backward(loss).detach())
        if not (is_up and setup.strikes(rank)):
            optimizer.step()
        is_up = False
    return trained


def scaled_losses(setup: Setup) -> Trained:
    """A loss scale that overflows in the first step: all ranks leave it out and scale less."""
    model = filled(setup, Net)
    optimizer = sgd(model)
    trained = Trained(model)
    scale = 2.0**130
    for step in range(3):
        optimizer.zero_grad()
        loss = class_loss(setup, model, step)
        (loss * scale).backward()
        if setup.ranks > 1:
            average(model.parameters())
        gradients = [p.grad for p in model.parameters()]
        is_over = torch.tensor(float(not all(g.isfinite().all() for g in gradients)))
        if setup.ranks > 1:
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
        if is_over:
            scale = 2.0**10
            continue
        for g in gradients:
            g /= scale
        optimizer.step()
        trained.losses.append(loss.detach())
    return trained


def scaled_losses_alone(setup: Setup) -> Trained:
    """One process: the first batch is left out, nothing is scaled."""
    model = filled(setup, Net)
    optimizer = sgd(model)
    trained = Trained(model)
    for step in (1, 2):
        optimizer.zero_grad()
        trained.losses.append(backward(class_loss(setup, model, step)).detach())
        optimizer.step()
    return trained


class Dropping(nn.Module):
    """Blocks with dropout; they may be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh()) for _ in range(2)
        )
        self.leave = nn.Linear(WIDTH, 4)
        self.keeps_random: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.keeps_random is None:
                x = x + block(x)
            else:
                keeps = self.keeps_random
                x = x + checkpoint(block, x, use_reentrant=False, preserve_rng_state=keeps)
        return self.leave(x)


def seeded_loss(setup: Setup, model: nn.Module, step: int, rank: int) -> Tensor:
    """Return a rank's loss; its dropout follows from step and rank."""
    torch.manual_seed(1_000 * setup.seed + 10 * step + rank)
    return class_loss(setup, model, step, rank)


def drops(setup: Setup) -> Trained:
    """Dropout of its own on each data-parallel rank. Mistake: one rank's model is left in eval."""
    rank = dist.get_rank()
    model = filled(setup, Dropping)
    model.train(not setup.strikes(rank))
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(seeded_loss(setup, model, step, rank)),
        before_update=lambda step: average(model.parameters()),
    )


def checkpoints(setup: Setup) -> Trained:
    """The same, recomputed in backward with the random state put back. Mistake: one rank does not
    put it back."""
    rank = dist.get_rank()
    model = filled(setup, Dropping)
    model.keeps_random = not setup.strikes(rank)
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(seeded_loss(setup, model, step, rank)),
        before_update=lambda step: average(model.parameters()),
    )


def drops_written_out(setup: Setup) -> list[State]:
    """All ranks in one process, nothing recomputed."""
    model = filled(setup, Dropping)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(setup.ranks):
            (seeded_loss(setup, model, step, rank) / setup.ranks).backward()
        optimizer.step()
    return [state(model)] * setup.ranks


def evaluations(setup: Setup) -> Trained:
    """All ranks evaluate on the same rows behind each step. Mistake: one rank does so in train
    mode, with dropout."""
    rank = dist.get_rank()
    model = filled(setup, Dropping)
    wrapped = DDP(model)
    trained = Trained(model)

    def evaluate(step: int) -> None:
        model.train(setup.strikes(rank))
        with torch.no_grad():
            trained.note("evaluated", model(rows(setup, 500)))
        model.train()

    return train(
        trained,
        sgd(model),
        lambda step: backward(seeded_loss(setup, wrapped, step, rank)),
        after_update=evaluate,
    )


class Deep(Net):
    """Layers of which some are left out in a step."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.kept: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, layer in enumerate(self.layers):
            if number in self.kept:
                x = layer(x)
        return self.leave(x)


def deep_loss(setup: Setup, model: Deep, step: int) -> Tensor:
    """Return the loss; which layers run follows from the step."""
    drawn = torch.rand(4, generator=chooser(setup, 49, step))
    model.kept = {0, *(n for n in range(4) if drawn[n] < 0.5)}
    return class_loss(setup, model, step)


def depth_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Deep)
    return train(
        Trained(model), sgd(model), lambda step: backward(deep_loss(setup, model, step)), steps=3
    )


def depth(setup: Setup) -> Trained:
    """Layers left out at random, the same ones on all ranks."""
    model = filled(setup, Deep)

    def meet(step: int) -> None:
        average(p for p in model.parameters() if p.grad is not None)

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(deep_loss(setup, model, step)),
        before_update=meet,
        steps=3,
    )


class Early(nn.Module):
    """Rows that the first exit is sure of leave there; the others go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.exits = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        early = self.exits[0](x)
        goes_on = early.detach().softmax(-1).amax(-1) < 0.45
        if not goes_on.any():
            return early
        late = self.exits[1](self.second(x[goes_on]))
        return early.index_put((goes_on.nonzero()[:, 0],), late)


def early_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    """Return the loss of rows of which the first are large, and sure."""
    x = torch.cat([3 * rows(setup, step)[:8], 0.1 * rows(setup, step)[8:]])
    return F.cross_entropy(model(part(x, setup)), part(labels(setup, step), setup))


def early_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Early)
    return in_one_process(setup, model, lambda step: early_loss(setup, model, step))


def early(setup: Setup) -> Trained:
    """Unlike numbers of rows go through the later layers on each rank."""
    model = filled(setup, Early)
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(early_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
    )


class Carrying(nn.Module):
    """A recurrent cell whose state goes from step to step in a buffer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, 4)
        self.register_buffer("carried", torch.zeros(count, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.carried
        for turn in range(2):
            hidden = self.cell(x * (1 + turn), hidden)
        self.carried = hidden.detach()
        return self.leave(hidden)


def carrying(setup: Setup) -> Trained:
    """Truncated backpropagation through time: each rank carries the state of its own rows."""
    model = filled(setup, lambda: Carrying(ROWS // setup.ranks))
    called = model if setup.ranks == 1 else DDP(model, broadcast_buffers=False)
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, called, step)),
        steps=3,
    )
