"""Buffers: what must agree over ranks, what must not, and statistics of all rows or of own ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    ROWS,
    WIDTH,
    Net,
    SummedBoth,
    average,
    backward,
    class_loss,
    in_one_process,
    labels,
    part,
    sgd,
    summed,
    whole_numbers,
)
from tests.lab.unusual.truths import State, state

TOKENS, BUCKETS = 20, 6


class Hashed(nn.Module):
    """Tokens to buckets by a table of whole numbers, and counts of what was seen here."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(TOKENS, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(BUCKETS, dtype=torch.long))
        self.embed = nn.Embedding(BUCKETS, WIDTH)
        self.body = Net(layers=1)

    def forward(self, tokens: Tensor) -> Tensor:
        buckets = self.table[tokens]
        self.seen += torch.bincount(buckets.flatten(), minlength=BUCKETS)
        return self.body(self.embed(buckets).mean(1))


def hashed_model(setup: Setup) -> Hashed:
    model = filled(setup, Hashed)
    model.table.copy_(whole_numbers(setup, 51, below=BUCKETS, shape=(TOKENS,)))
    return model


def hashed_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    tokens = whole_numbers(setup, step, 52, below=TOKENS, shape=(ROWS, 3))
    return F.cross_entropy(model(part(tokens, setup)), part(labels(setup, step), setup))


def hashed_alone(setup: Setup) -> Trained:
    """One process."""
    model = hashed_model(setup)
    return in_one_process(setup, model, lambda step: hashed_loss(setup, model, step))


def hashed(setup: Setup) -> Trained:
    """A table of whole numbers that all ranks hold, and counts of each rank's own tokens, which add
    up to those of all. Mistake: one rank never loaded the table."""
    model = hashed_model(setup)
    if setup.strikes(dist.get_rank()):
        model.table.zero_()
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(hashed_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
    )


def counted(setup: Setup, trained: Trained) -> str:
    """The counts of all ranks add up to those of one process."""
    right = Setup(shape=setup.shape, ranks=1, seed=setup.seed)
    total = summed(trained.model.seen)
    is_right = torch.equal(total, hashed_alone(right).model.seen)
    return "" if is_right else "counts do not add up"


class Rounded(torch.autograd.Function):
    """To a grid of a scale, with the gradient of what was not rounded."""

    @staticmethod
    def forward(ctx: object, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale * 7).round().clamp(-7, 7) * scale / 7

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Quantizer(nn.Module):
    """Rounds to a grid up to the largest element of all ranks' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.is_shared, self.is_own = False, False

    def forward(self, x: Tensor) -> Tensor:
        largest = x.detach().abs().max()
        mine = largest.clone()
        if self.is_shared:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.largest.copy_(mine if self.is_own else largest)
        return Rounded.apply(x, self.largest.clone())


class Quantized(nn.Module):
    """Two linear layers with rounded activations and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, 4)
        self.quantizer = Quantizer()

    def forward(self, x: Tensor) -> Tensor:
        made = self.quantizer(torch.tanh(self.up(x)))
        weight = Rounded.apply(self.down.weight, self.down.weight.detach().abs().max())
        return F.linear(made, weight, self.down.bias)


def quantized_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Quantized)
    return in_one_process(setup, model, lambda step: class_loss(setup, model, step))


def quantized(setup: Setup) -> Trained:
    """Training for quantization; scales are maxima over ranks. Mistake: one rank takes the maximum
    of its own rows."""
    model = filled(setup, Quantized)
    model.quantizer.is_shared = True
    model.quantizer.is_own = setup.strikes(dist.get_rank())
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
    )


class Whitening(nn.Module):
    """Normalizes columns by the mean and variance of all rows, and keeps averages of both."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.is_shared, self.is_one_way = False, False

    def over_ranks(self, x: Tensor) -> Tensor:
        if self.is_one_way:
            return x + (summed(x) - x).detach()
        return SummedBoth.apply(x) if self.is_shared else x

    def forward(self, x: Tensor) -> Tensor:
        mean = self.over_ranks(x.sum(0)) / ROWS
        variance = self.over_ranks((x - mean).square().sum(0)) / ROWS
        self.mean.lerp_(mean.detach(), 0.1)
        self.variance.lerp_(variance.detach(), 0.1)
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


class Normed(nn.Module):
    """A linear layer, a norm over rows, and a linear layer."""

    def __init__(self, kind: type[nn.Module] = Whitening) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.norm = kind(WIDTH)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))))


def synchronized_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Normed)
    return in_one_process(setup, model, lambda step: class_loss(setup, model, step))


def synchronized(setup: Setup) -> Trained:
    """Batch norm over the rows of all ranks, by hand. Mistake: sums have the gradient of this
    rank's part alone."""
    model = filled(setup, Normed)
    model.norm.is_shared, model.norm.is_one_way = True, setup.is_faulty
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
    )


def batch_normed(setup: Setup) -> Trained:
    """Batch norm over each rank's own rows, whose buffers go their own ways. Mistake: gradients of
    the norm's weight and bias are not averaged."""
    model = filled(setup, lambda: Normed(nn.BatchNorm1d))

    def meet(step: int) -> None:
        is_met = not setup.is_faulty
        average(p for n, p in model.named_parameters() if is_met or not n.startswith("norm"))

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


def batch_normed_written_out(setup: Setup) -> list[State]:
    """All ranks in one process: one model a rank."""
    models = [filled(setup, lambda: Normed(nn.BatchNorm1d)) for _ in range(setup.ranks)]
    for step in range(2):
        for rank, model in enumerate(models):
            model.zero_grad()
            class_loss(setup, model, step, rank).backward()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models)):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p -= 0.2 * mean
    return [state(model) for model in models]
