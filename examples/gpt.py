"""A small byte-level GPT, its text and its batches: what every example here trains.

The same seed gives the same weights, and the same step the same global batch, whatever the
topology: a data-parallel rank takes its own rows of it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = Path(__file__).with_name("text.txt")
VOCABULARY = 256


@dataclass(frozen=True)
class Sizes:
    """How large the model and its batches are."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    context: int = 32
    """Tokens per sample."""
    batch: int = 8
    """Samples per step, over all data-parallel ranks together."""
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with rotary positions; heads may be split over ranks."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.hidden // sizes.heads
        self.dropout = sizes.dropout
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Mix [batch, time, hidden] along time."""
        batch, time = x.shape[:2]
        # -1 heads: under tensor parallelism the projections give this rank's heads only
        shape = (batch, time, -1, self.head_width)
        q = rotate(self.q_proj(x).view(shape).transpose(1, 2), rotation)
        k = rotate(self.k_proj(x).view(shape).transpose(1, 2), rotation)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up_proj = nn.Linear(sizes.hidden, 4 * sizes.hidden, bias=False)
        self.down_proj = nn.Linear(4 * sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, hidden] to the same shape."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each around a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map [batch, time, hidden] to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    A pipeline stage is the same model with the parts of other stages taken out: `embed`, `norm` and
    `head` may be None, and `layers` keeps the numbers of those that stay.
    """

    rotation: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, sizes.hidden)
        self.layers = nn.ModuleDict({str(n): Block(sizes) for n in range(sizes.layers)})
        self.norm: nn.Module | None = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.head: nn.Module | None = nn.Linear(sizes.hidden, VOCABULARY, bias=False)
        width = sizes.hidden // sizes.heads
        frequency = 10_000.0 ** -(torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(sizes.context), frequency)
        self.register_buffer("rotation", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes [batch, time] to logits [batch, time, 256]; in a stage, what its parts do."""
        rotation = (self.rotation[0], self.rotation[1])
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, rotation)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of [batch, heads, time, width] by their position's angles."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def build(sizes: Sizes) -> GPT:
    """Make the model on CPU, with the same weights on every rank of every topology."""
    torch.manual_seed(0)
    model = GPT(sizes)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.05)
    return model


@cache
def _text() -> Tensor:
    return torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()


def batch(sizes: Sizes, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, [batch / parts, context] each: the rows of data rank `part`."""
    text = _text()
    chooser = torch.Generator().manual_seed(1_000 + step)
    starts = torch.randint(len(text) - sizes.context - 1, (sizes.batch,), generator=chooser)
    rows = torch.stack([text[start : start + sizes.context + 1] for start in starts])
    mine = rows.chunk(parts)[part]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, 256] against [batch, time]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    sizes: Sizes
    steps: int
    check_file: Path | None


def options(description: str | None) -> Options:
    """Read the command line every example shares."""
    parser = argparse.ArgumentParser(description=description)
    default = Sizes()
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--hidden", type=int, default=default.hidden)
    parser.add_argument("--heads", type=int, default=default.heads)
    parser.add_argument("--context", type=int, default=default.context)
    parser.add_argument("--batch", type=int, default=default.batch, help="samples over all ranks")
    parser.add_argument("--dropout", type=float, default=default.dropout, help="in attention")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--check-file",
        type=Path,
        help="write what training left behind, PATH.rank0.safetensors and .json and so on",
    )
    given = vars(parser.parse_args())
    steps, check_file = given.pop("steps"), given.pop("check_file")
    return Options(Sizes(**given), steps, check_file)
