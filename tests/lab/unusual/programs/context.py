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
    normal,
    sgd,
    shifted,
    summed,
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
    """Ring attention. Mistake: the mask takes blocks for those of the ring's other direction."""
    return in_parts(setup, filled(setup, lambda: Reader(RingMix, setup.is_faulty)))


def padded_alone(setup: Setup) -> Trained:
    """One process; texts end early, and the loss is the mean over what is there."""
    model = filled(setup, Reader)

    def loss_of(step: int) -> Tensor:
        tokens, targets = texts(setup, step)
        there = is_there(setup, step)
        return (token_losses(model(tokens), targets) * there).sum() / there.sum()

    return in_one_process(setup, model, loss_of)


def is_there(setup: Setup, step: int) -> Tensor:
    """Return which places of the texts are no padding, [batch, time]."""
    ends = torch.tensor([5, 8, 6]).roll(step + setup.seed)
    return (torch.arange(TIME) < ends[:, None]).float()


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def padded(setup: Setup) -> Trained:
    """Ring attention over texts of unlike lengths: the loss is divided by the tokens of all ranks,
    and gradients are added. Mistake: by the tokens of this rank, and averaged."""
    model = filled(setup, lambda: Reader(RingMix, False))

    def one(step: int) -> Tensor:
        tokens, targets = map(of_this_rank, texts(setup, step))
        there = of_this_rank(is_there(setup, step))
        losses = token_losses(model(tokens, dist.get_rank() * tokens.shape[1]), targets) * there
        count = setup.ranks * there.sum() if setup.is_faulty else summed(there.sum())
        return backward(losses.sum() / count)

    def meet(step: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)

    return train(Trained(model), sgd(model), one, before_update=meet)


def exchanged(x: Tensor, cut: int, join: int) -> Tensor:
    """Cut along one dim, send a piece to each rank, and join what came along another dim."""
    pieces = torch.stack(x.chunk(dist.get_world_size(), cut)).contiguous()
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces)
    return torch.cat(came.unbind(0), join)


class Exchange(torch.autograd.Function):
    """That with gradients, which go the way back."""

    @staticmethod
    def forward(ctx: object, x: Tensor, cut: int, join: int) -> Tensor:
        ctx.way = (join, cut)
        return exchanged(x, cut, join)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchanged(gradient, *ctx.way), None, None


class HeadsMix(Mix):
    """Positions are exchanged for heads in front of attention, and back behind it."""

    def __init__(self, is_rolled: bool) -> None:
        super().__init__()
        self.is_rolled = is_rolled

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))
        mixed = Exchange.apply(super().attend(q, k, v), 2, 1)
        return mixed.roll(1, 1) if self.is_rolled else mixed


def exchanged_heads(setup: Setup) -> Trained:
    """All-to-all attention. Mistake: heads come back one place too far."""
    return in_parts(setup, filled(setup, lambda: Reader(HeadsMix, setup.is_faulty)))


class ShiftBack(torch.autograd.Function):
    """To the rank before in the ring; gradients go the way back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return shifted(x, -1)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return shifted(gradient)


class Rim(nn.Conv2d):
    """A convolution of an image whose lines are split: those at the rim come from neighbours."""

    is_crossed = False

    def forward(self, x: Tensor) -> Tensor:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        above = Shift.apply(x[:, :, -1:]) * float(rank > 0)
        below = ShiftBack.apply(x[:, :, :1]) * float(rank < last)
        if self.is_crossed:
            above, below = below, above
        return self._conv_forward(
            F.pad(torch.cat([above, x, below], 2), (1, 1)), self.weight, self.bias
        )


class Painter(nn.Module):
    """Images [n, 2, height, width] to a class for each point."""

    def __init__(self, kind: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        padding = 1 if kind is nn.Conv2d else 0
        self.convs = nn.ModuleList(kind(before, 4, 3, padding=padding) for before in (2, 4))
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.tanh(conv(x))
        return self.head(x)


def images(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Return images and the class of each point."""
    classes = whole_numbers(setup, step, 8, below=3, shape=(2, 9, 5))
    return normal(setup, step, shape=(2, 2, 9, 5)), classes


def painted_alone(setup: Setup) -> Trained:
    """One process with whole images."""
    model = filled(setup, Painter)

    def loss_of(step: int) -> Tensor:
        x, classes = images(setup, step)
        return F.cross_entropy(model(x), classes)

    return in_one_process(setup, model, loss_of)


def painted(setup: Setup) -> Trained:
    """Images split line by line. Mistake: what comes from above is put below, and what comes from
    below above."""
    model = filled(setup, lambda: Painter(Rim))
    for conv in model.convs:
        conv.is_crossed = setup.is_faulty

    def one(step: int) -> Tensor:
        x, classes = images(setup, step)
        mine = x.chunk(setup.ranks, 2)[dist.get_rank()].contiguous()
        return backward(F.cross_entropy(model(mine), of_this_rank(classes)))

    return train(
        Trained(model), sgd(model), one, before_update=lambda step: average(model.parameters())
    )
