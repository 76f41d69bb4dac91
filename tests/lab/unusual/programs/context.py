"""Sequences and images that are split over ranks, by hand."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    WIDTH,
    Block,
    average,
    backward,
    in_one_process,
    sgd,
    shifted,
    whole_numbers,
)

TIME, HEADS, VOCABULARY = 8, 4, 11


class Shift(torch.autograd.Function):
    """To the next rank in the ring; gradients go the way back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return shifted(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return shifted(gradient, -1)


class Mix(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [self.split(p(x)) for p in (self.q, self.k, self.v)]
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class RingMix(Mix):
    """Keys and values go around a ring; what has come by is added up with its weights."""

    def __init__(self, is_reversed: bool) -> None:
        super().__init__()
        self.is_reversed = is_reversed

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        time = q.shape[2]
        here = torch.arange(rank * time, (rank + 1) * time)
        total = weight = torch.zeros(())
        for turn in range(ranks):
            source = (rank + turn if self.is_reversed else rank - turn) % ranks
            there = torch.arange(source * time, (source + 1) * time)
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(there > here[:, None], -torch.inf).exp()
            total = total + scores @ v
            weight = weight + scores.sum(-1, keepdim=True)
            if turn < ranks - 1:
                k, v = Shift.apply(k), Shift.apply(v)
        return total / weight


class Reader(nn.Module):
    """Tokens [batch, time] to logits; time may be split."""

    def __init__(self, mix: type[Mix] = Mix, *options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TIME, WIDTH)
        self.mixes = nn.ModuleList(mix(*options) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(first, first + tokens.shape[1]))
        for mix, block in zip(self.mixes, self.blocks):
            x = block(x + mix(x))
        return self.head(x)


def texts(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and what follows each, [batch, time]."""
    both = whole_numbers(setup, step, 5, below=VOCABULARY, shape=(3, TIME + 1))
    return both[:, :-1], both[:, 1:]


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_alone(setup: Setup) -> Trained:
    """One process with the whole sequence."""
    model = filled(setup, Reader)

    def loss_of(step: int) -> Tensor:
        tokens, targets = texts(setup, step)
        return text_loss(model(tokens), targets)

    return in_one_process(setup, model, loss_of)


def of_this_rank(x: Tensor) -> Tensor:
    """Return this rank's part of the time of [batch, time]."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def in_parts(setup: Setup, model: nn.Module) -> Trained:
    """Train on a part of the sequence; gradients are averaged by hand."""

    def one(step: int) -> Tensor:
        tokens, targets = map(of_this_rank, texts(setup, step))
        first = dist.get_rank() * tokens.shape[1]
        return backward(text_loss(model(tokens, first), targets))

    return train(
        Trained(model), sgd(model), one, before_update=lambda step: average(model.parameters())
    )


def ring(setup: Setup) -> Trained:
    """Ring attention. Mistake: the mask takes the blocks for those of the ring's other direction."""
    return in_parts(setup, filled(setup, lambda: Reader(RingMix, setup.is_faulty)))
