"""A tiny GPT whose pieces are made by whoever parallelizes it, and its batches.

The same seed gives the same weights and the same global batch, however the model is split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.setup import Setup, Shape

Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Model = TypeVar("Model", bound=nn.Module)


class Parts:
    """How a block's pieces are made: whole, as one process has them."""

    def column(self, inside: int, outside: int) -> nn.Module:
        """A linear layer whose outputs may be split."""
        return nn.Linear(inside, outside, bias=False)

    def row(self, inside: int, outside: int) -> nn.Module:
        """A linear layer whose inputs may be split."""
        return nn.Linear(inside, outside, bias=False)

    def feed_forward(self, shape: Shape) -> nn.Module:
        """What follows attention."""
        return FeedForward(shape.hidden, self)

    def exchange(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole sequence, [batch, heads, time, width] each."""
        return k, v


class FeedForward(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, hidden: int, parts: Parts) -> None:
        super().__init__()
        self.up_proj = parts.column(hidden, 4 * hidden)
        self.act = nn.GELU()
        self.down_proj = parts.row(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class Attention(nn.Module):
    """Causal self-attention; heads or positions may be split over ranks."""

    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self._width = shape.hidden // shape.heads
        self._exchange: Exchange = parts.exchange
        self.places: Tensor | None = None
        """Positions of the tokens, where they are no neighbours."""
        self.q_proj = parts.column(shape.hidden, shape.hidden)
        self.k_proj = parts.column(shape.hidden, shape.hidden)
        self.v_proj = parts.column(shape.hidden, shape.hidden)
        self.o_proj = parts.row(shape.hidden, shape.hidden)

    def forward(self, x: Tensor, first: int) -> Tensor:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        batch, time = projected[0].shape[:2]  # a split sequence may have been gathered
        q, k, v = (p.view(batch, time, -1, self._width).transpose(1, 2) for p in projected)
        k, v = self._exchange(k, v)
        first = 0 if k.shape[2] == time else first
        here = torch.arange(first, first + time) if self.places is None else self.places
        allowed = torch.arange(k.shape[2]) <= here[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each around a residual."""

    def __init__(self, shape: Shape, parts: Parts, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention = Attention(shape, parts)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.feed_forward = parts.feed_forward(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), first))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Tokens [batch, time] to logits [batch, time, vocabulary].

    A pipeline stage has None for `embed`, `positions`, `norm` or `head`, and fewer `layers`, which
    keep their numbers.
    """

    def __init__(self, shape: Shape, parts: Parts | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        made = parts or Parts()
        self.embed: nn.Module | None = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions: nn.Module | None = nn.Embedding(shape.context + 1, shape.hidden)
        self.layers = nn.ModuleDict(
            {str(n): Block(shape, made, dropout) for n in range(shape.layers)}
        )
        self.norm: nn.Module | None = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head: nn.Module | None = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """`first`: the position of the first token of [batch, time], where time is split."""
        if self.embed is not None and self.positions is not None:
            places = torch.arange(first, first + x.shape[1])
            x = self.embed(x) + self.positions(places)
        for layer in self.layers.values():
            x = layer(x, first)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)


def whole(setup: Setup, parts: Parts | None = None, dropout: float = 0.0) -> GPT:
    """Make the model on this rank with weights that follow from the seed alone."""
    return filled(setup, lambda: GPT(setup.shape, parts, dropout))


def filled(setup: Setup, make: Callable[[], Model]) -> Model:
    """Make a model whose weights, but those of norms, follow from the seed alone."""
    state = torch.get_rng_state()
    torch.manual_seed(100 + setup.seed)
    model = make()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.2)
    torch.set_rng_state(state)
    return model.to(setup.torch_dtype)


def cut_from(source: nn.Module, target: nn.Module, place: int, places: int) -> dict[str, int]:
    """Fill a model that has slices of some weights; return which dim each of those is cut along."""
    cuts = {}
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            value = values[name]
            for dim, (mine, all_) in enumerate(zip(parameter.shape, value.shape)):
                if mine != all_:
                    value = value.chunk(places, dim)[place]
                    cuts[name] = dim
            parameter.copy_(value)
    return cuts


def batch(setup: Setup, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, [batch / parts, context] each: the rows of data rank `part`."""
    shape = setup.shape
    chooser = torch.Generator().manual_seed(10_000 + 100 * setup.seed + step)
    rows = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1), generator=chooser)
    mine = rows.chunk(parts)[part]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] against [batch, time]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def twin(model: nn.Module) -> nn.Module:
    """Return an independent copy."""
    return copy.deepcopy(model)
