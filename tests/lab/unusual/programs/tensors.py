"""Layers that are cut over ranks by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import cut_from, filled
from tests.lab.faults.parallel import Column, Leave, Row, SequenceColumn, SequenceRow
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    WIDTH,
    Block,
    SummedBoth,
    backward,
    in_one_process,
    normal,
    sgd,
    whole_numbers,
)

VOCABULARY = 12


class TokenLoss(nn.Module):
    """The mean cross entropy of logits [n, vocabulary]."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class CutLoss(nn.Module):
    """The same of logits whose vocabulary is cut over ranks."""

    is_own_sum = False

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        group = dist.group.WORLD
        most = logits.detach().amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        mine = (logits - most[:, None]).exp().sum(-1)
        total = Leave.apply(mine, group)
        columns, is_mine = of_this_part(targets, logits.shape[-1])
        hit = logits.gather(-1, columns[:, None])[:, 0] * is_mine
        aimed = Leave.apply(hit, group) - most
        return ((mine if self.is_own_sum else total).log() - aimed).mean()


def of_this_part(tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return places in this rank's part of the vocabulary, and which tokens are in it."""
    places = tokens - dist.get_rank() * width
    is_mine = (places >= 0) & (places < width)
    return places.clamp(0, width - 1), is_mine.float()


class CutEmbedding(nn.Module):
    """Some rows of an embedding; the others are those of the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY // dist.get_world_size(), WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        places, is_mine = of_this_part(tokens, len(self.weight))
        return Leave.apply(self.weight[places] * is_mine[:, None], dist.group.WORLD)


class Speller(nn.Module):
    """Tokens [n] to the loss of the next ones."""

    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        group = dist.group.WORLD
        self.embed = CutEmbedding() if is_cut else nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = (
            Column(WIDTH, VOCABULARY, group) if is_cut else nn.Linear(WIDTH, VOCABULARY, bias=False)
        )
        self.criterion = CutLoss() if is_cut else TokenLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.head(self.block(self.embed(tokens))), targets)


def spelling(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and what follows each."""
    both = whole_numbers(setup, step, 5, below=VOCABULARY, shape=(2, 9))
    return both[0], both[1]


def spelled_alone(setup: Setup) -> Trained:
    """One process with the whole vocabulary."""
    model = filled(setup, Speller)
    return in_one_process(setup, model, lambda step: model(*spelling(setup, step)))


def spelled(setup: Setup) -> Trained:
    """Embedding, head and loss are cut along the vocabulary. Mistake: one rank takes the sum over
    its own part of the vocabulary for the whole one."""
    model = Speller(is_cut=True)
    cuts = cut_from(filled(setup, Speller), model, dist.get_rank(), setup.ranks)
    model.criterion.is_own_sum = setup.strikes(dist.get_rank())
    return train(
        Trained(model, cuts=cuts), sgd(model), lambda step: backward(model(*spelling(setup, step)))
    )


class WideNorm(nn.Module):
    """Divides by the root mean square over all heads; the heads may be cut."""

    def __init__(self, width: int, is_cut: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.is_cut, self.is_one_way = is_cut, False

    def forward(self, x: Tensor) -> Tensor:
        total = x.square().sum(-1, keepdim=True)
        if self.is_one_way:
            total = Leave.apply(total, dist.group.WORLD)
        elif self.is_cut:
            total = SummedBoth.apply(total)
        return x / (total / WIDTH + 1e-5).sqrt() * self.weight


class Heads(nn.Module):
    """Attention whose queries and keys are normed over all heads together."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        group = dist.group.WORLD
        self.q, self.k, self.v = (
            Column(WIDTH, WIDTH, group) if parts > 1 else nn.Linear(WIDTH, WIDTH, bias=False)
            for _ in range(3)
        )
        self.q_gain, self.k_gain = (WideNorm(WIDTH // parts, parts > 1) for _ in range(2))
        self.out = Row(WIDTH, WIDTH, group) if parts > 1 else nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.q_gain(self.q(x)), self.k_gain(self.k(x)), self.v(x))
        q, k, v = (h.unflatten(-1, (-1, 2)).transpose(-2, -3) for h in heads)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Attentive(nn.Module):
    """Two such layers."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Heads(parts) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for heads, block in zip(self.heads, self.blocks):
            x = block(x + heads(x))
        return x


def distance(setup: Setup, model: nn.Module, step: int) -> Tensor:
    """Return how far what a model makes of [3, 5, width] is from where it should be."""
    x, goal = normal(setup, step, 1, shape=(2, 3, 5, WIDTH))
    return F.mse_loss(model(x), goal)


def attentive_alone(setup: Setup) -> Trained:
    """One process with all heads."""
    model = filled(setup, Attentive)
    return in_one_process(setup, model, lambda step: distance(setup, model, step))


def attentive(setup: Setup) -> Trained:
    """Heads are cut, and the norms' sums of squares are summed over ranks forward and backward.
    Mistake: in the last layer forward alone."""
    model = Attentive(setup.ranks)
    cuts = cut_from(filled(setup, Attentive), model, dist.get_rank(), setup.ranks)
    model.heads[1].q_gain.is_one_way = setup.is_faulty
    return train(
        Trained(model, cuts=cuts), sgd(model), lambda step: backward(distance(setup, model, step))
    )


class Sliced(nn.Module):
    """A block whose linear layers are cut and whose norm and bias work on a slice of the time."""

    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        group = dist.group.WORLD
        self.norm = nn.LayerNorm(WIDTH)
        self.up = SequenceColumn(WIDTH, 16, group) if is_cut else nn.Linear(WIDTH, 16, bias=False)
        self.down = SequenceRow(16, WIDTH, group) if is_cut else nn.Linear(16, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) + self.shift


class SlicedNet(nn.Module):
    """Two such blocks."""

    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sliced(is_cut) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def slices(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and goals, [3, time, width], of this rank's slice of the time."""
    x, goal = normal(setup, step, 1, shape=(2, 3, 8, WIDTH))
    if setup.ranks == 1:
        return x, goal
    rank = dist.get_rank()
    return x.chunk(setup.ranks, 1)[rank].contiguous(), goal.chunk(setup.ranks, 1)[rank]


def sliced_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    x, goal = slices(setup, step)
    return F.mse_loss(model(x), goal)


def sliced_alone(setup: Setup) -> Trained:
    """One process with the whole time."""
    model = filled(setup, SlicedNet)
    return in_one_process(setup, model, lambda step: sliced_loss(setup, model, step))


def sliced(setup: Setup) -> Trained:
    """Sequence parallelism by hand: what is not cut has a gradient of its slice, and these are
    added. Mistake: those of one bias are not."""
    model = SlicedNet(is_cut=True)
    cuts = cut_from(filled(setup, SlicedNet), model, dist.get_rank(), setup.ranks)
    left_out = "blocks.1.shift" if setup.is_faulty else ""

    def meet(step: int) -> None:
        for name, p in model.named_parameters():
            if name not in cuts and name != left_out:
                dist.all_reduce(p.grad)

    return train(
        Trained(model, cuts=cuts),
        sgd(model),
        lambda step: backward(sliced_loss(setup, model, step) / setup.ranks),
        before_update=meet,
    )
