"""One process with one mistake: what goes wrong when a model is ported, loaded or trained by other
code. The model has what people get wrong: fused projections, shared heads, rotated positions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults import truth
from tests.lab.faults.model import Parts, batch, filled
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import RATE, Setup, Shape, Trained, train

PADDED = -100


class Rotated(nn.Module):
    """Queries, keys and values of shared heads from one projection, positions by rotation."""

    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self._width = shape.hidden // shape.heads
        self._shared = 2
        self.qkv_proj = parts.column(shape.hidden, shape.hidden * 2)
        self.o_proj = parts.row(shape.hidden, shape.hidden)
        self.scale = self._width**-0.5
        self.is_causal = True
        self.is_grouped, self.is_paired, self.is_repeated_whole = True, False, False
        self.key_offset = 0

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv_proj(x)
        time = x.shape[1]
        heads = made.shape[-1] // (2 * self._width)
        q, k, v = self._split(made.unflatten(-1, (-1, self._width)).transpose(1, 2), heads)
        q, k = self._turned(q, 0), self._turned(k, self.key_offset)
        k, v = (self._shared_out(each) for each in (k, v))
        allowed = torch.ones(time, time, dtype=torch.bool)
        allowed = allowed.tril() if self.is_causal else allowed
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, made: Tensor, heads: int) -> tuple[Tensor, ...]:
        """All queries, then all keys, then all values; or head by head."""
        shared = heads // self._shared
        if self.is_grouped:
            return made.split([heads, shared, shared], 1)
        by_head = made.unflatten(1, (shared, -1))
        return by_head[:, :, :-2].flatten(1, 2), by_head[:, :, -2], by_head[:, :, -1]

    def _shared_out(self, x: Tensor) -> Tensor:
        """Each key and value to the queries that share it, which are neighbours."""
        if self.is_repeated_whole:
            return x.repeat(1, self._shared, 1, 1)
        return x.repeat_interleave(self._shared, 1)

    def _turned(self, x: Tensor, first: int) -> Tensor:
        """Rotate [batch, heads, time, width] by positions: halves of the width, or neighbours."""
        half = self._width // 2
        angles = torch.arange(first, first + x.shape[2])[:, None] / 100 ** (
            torch.arange(half) / half
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.is_paired:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([turned, x[..., 2 * half :]], -1)


class Gated(nn.Module):
    """A feed-forward with a gate."""

    def __init__(self, hidden: int, parts: Parts) -> None:
        super().__init__()
        self.gate_proj = parts.column(hidden, 2 * hidden)
        self.up_proj = parts.column(hidden, 2 * hidden)
        self.act = nn.GELU()
        self.down_proj = parts.row(2 * hidden, hidden)
        self.is_swapped = False

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate, up = (up, gate) if self.is_swapped else (gate, up)
        return self.down_proj(self.act(gate) * up)


class Layer(nn.Module):
    """Attention, then feed-forward, each around a residual."""

    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention = Rotated(shape, parts)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.feed_forward = Gated(shape.hidden, parts)
        self.dropout = nn.Dropout(0.0)
        self.is_detached = self.is_norm_skipped = False

    def forward(self, x: Tensor) -> Tensor:
        branch = self.dropout(self.attention(self.attention_norm(x)))
        x = (x.detach() if self.is_detached else x) + branch
        given = x + branch if self.is_norm_skipped else x
        return x + self.feed_forward(self.feed_forward_norm(given))


class Decoder(nn.Module):
    """Tokens [batch, time] to logits [batch, time, vocabulary]; the head is the embedding."""

    def __init__(self, shape: Shape, parts: Parts | None = None) -> None:
        super().__init__()
        made = parts or Parts()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleDict({str(n): Layer(shape, made) for n in range(shape.layers)})
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.scale = shape.hidden**0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


class OtherLayer(nn.Module):
    """A layer, its modules under other names."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.ln_1, self.mixer = layer.attention_norm, layer.attention
        self.ln_2, self.mlp = layer.feed_forward_norm, layer.feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class OtherDecoder(nn.Module):
    """A decoder, its modules under other names."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        layers = [OtherLayer(layer) for layer in inner.layers.values()]
        self.transformer = nn.ModuleDict(
            {"wte": inner.embed, "h": nn.ModuleList(layers), "ln_f": inner.norm}
        )
        self.lm_head = inner.head
        self._scale = inner.scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.transformer["wte"](x) * self._scale
        for layer in self.transformer["h"]:
            x = layer(x)
        return self.lm_head(self.transformer["ln_f"](x))


RENAMED = (
    r"^transformer\.wte=embed",
    r"^transformer\.h\.=layers.",
    r"^transformer\.ln_f=norm",
    r"^lm_head=head",
    r"\.ln_1\b=.attention_norm",
    r"\.mixer\b=.attention",
    r"\.ln_2\b=.feed_forward_norm",
    r"\.mlp\b=.feed_forward",
)


def decoder(setup: Setup, parts: Parts | None = None) -> Decoder:
    """Make the model with weights that follow from the seed alone."""
    return filled(setup, lambda: Decoder(setup.shape, parts))


def padded(setup: Setup, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return a batch whose later rows are mostly padding."""
    tokens, targets = batch(setup, step)
    targets[setup.shape.batch // 2 :, 2:] = PADDED
    return tokens.chunk(parts)[part], targets.chunk(parts)[part]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens that are not padding."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=PADDED)


def looped(
    setup: Setup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = mean_loss,
    limit: float = 0.0,
) -> Trained:
    """Train on the whole batch. `limit`: of the norm to which gradients are clipped, 0 for none."""

    def one(step: int) -> Tensor:
        tokens, targets = padded(setup, step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    def clip(step: int) -> None:
        if limit:
            nn.utils.clip_grad_norm_(model.parameters(), limit)

    return train(Trained(model), optimizer or sgd(model), one, before_update=clip)


def right(setup: Setup) -> Trained:
    """The original."""
    return looped(setup, decoder(setup))


def changed(change: Callable[[Decoder, Setup], None]) -> Callable[[Setup], Trained]:
    """Return the program of a port whose model `change` makes wrong."""

    def program(setup: Setup) -> Trained:
        model = decoder(setup)
        if setup.is_faulty:
            change(model, setup)
        return looped(setup, model)

    return program


def attribute(of: str, name: str, value: object) -> Callable[[Setup], Trained]:
    """Return the program of a port in which one module (`of`, in the layer of the fault; "" is the
    layer) has another option."""

    def change(model: Decoder, setup: Setup) -> None:
        setattr(model.layers[str(setup.layer)].get_submodule(of), name, value)

    return changed(change)


def transposed(model: Decoder, setup: Setup) -> None:
    with torch.no_grad():
        weight = model.layers[str(setup.layer)].attention.o_proj.weight
        weight.copy_(weight.t().clone())


def left_random(model: Decoder, setup: Setup) -> None:
    """A weight that the checkpoint has under another name keeps what it was made with."""
    own = torch.Generator().manual_seed(900 + setup.seed)
    with torch.no_grad():
        weight = model.layers[str(setup.layer)].feed_forward.up_proj.weight
        weight.copy_(torch.randn(weight.shape, generator=own) * 0.2)


def swapped_halves(model: Decoder, setup: Setup) -> None:
    """Keys and values of a fused weight were put together in the other order."""
    with torch.no_grad():
        weight = model.layers[str(setup.layer)].attention.qkv_proj.weight
        q, k, v = weight.clone().split([len(weight) // 2, len(weight) // 4, len(weight) // 4])
        weight.copy_(torch.cat([q, v, k]))


def untied(model: Decoder, setup: Setup) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def unscaled(model: Decoder, setup: Setup) -> None:
    model.scale = 1.0


def one_more(model: Decoder, setup: Setup) -> None:
    """The norm multiplies by one more than its weight, as if the checkpoint held it so."""
    norm = model.layers[str(setup.layer)].attention_norm
    norm.forward = lambda x: F.rms_norm(x, norm.normalized_shape, norm.weight + 1, norm.eps)


def dropping(model: Decoder, setup: Setup) -> None:
    model.layers[str(setup.layer)].dropout.p = 0.3


def last_first(model: Decoder, setup: Setup) -> None:
    """The layers in another order: names were sorted as text."""
    names = list(model.layers)
    names = [*names[1:], names[0]]
    for name in names:
        model.layers[name] = model.layers.pop(name)


def stepped(faulty: Callable[[Decoder], torch.optim.Optimizer]) -> Callable[[Setup], Trained]:
    """Return the program of a port with another optimizer."""

    def program(setup: Setup) -> Trained:
        model = decoder(setup)
        return looped(setup, model, faulty(model) if setup.is_faulty else None)

    return program


def decaying(model: Decoder) -> torch.optim.Optimizer:
    """Norms decay, and others do not."""
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": norms, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=RATE)


def twice_the_rate(model: Decoder) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2 * RATE)


def losing(faulty: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Setup], Trained]:
    """Return the program of a port with another loss."""

    def program(setup: Setup) -> Trained:
        return looped(setup, decoder(setup), loss_of=faulty if setup.is_faulty else mean_loss)

    return program


def shifted_twice(logits: Tensor, targets: Tensor) -> Tensor:
    """The targets are the next tokens already, and the loss shifts them once more."""
    return mean_loss(logits[:, :-1], targets[:, 1:])


def counting_padding(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean is over all tokens, padding too."""
    return mean_loss(logits, targets) * (targets != PADDED).float().mean()


def clipped(setup: Setup) -> Trained:
    """Gradients clipped to a norm of 0.1. Fault: they are not."""
    return looped(setup, decoder(setup), limit=0.0 if setup.is_faulty else 0.1)


def accumulated(setup: Setup) -> Trained:
    """The batch in two halves, whose losses are divided by the tokens of both. Fault: each by its
    own, and by two: halves with few tokens weigh as much as those with many."""
    return by_halves(setup, lambda share: 0.5 if setup.is_faulty else share)


def undivided(setup: Setup) -> Trained:
    """The same. Fault: the losses of the halves are not divided at all."""
    return by_halves(setup, lambda share: share * (2 if setup.is_faulty else 1))


def by_halves(setup: Setup, weight: Callable[[Tensor], Tensor | float]) -> Trained:
    """Train on the batch in two halves, each of whose losses is multiplied by what `weight` makes
    of its share of the tokens."""
    model = decoder(setup)

    def one(step: int) -> Tensor:
        losses = []
        total = (padded(setup, step)[1] != PADDED).sum()
        for half in range(2):
            tokens, targets = padded(setup, step, half, 2)
            share = (targets != PADDED).sum() / total
            loss = mean_loss(model(tokens), targets) * weight(share)
            loss.backward()
            losses.append(loss)
        return torch.stack(losses).sum()

    return train(Trained(model), sgd(model), one)


def renamed(setup: Setup) -> Trained:
    """The model under the names of another library. Fault: one norm has another eps."""
    model = decoder(setup)
    if setup.is_faulty:
        model.layers[str(setup.layer)].feed_forward_norm.eps = 1e-3
    trained = looped(setup, OtherDecoder(model))
    rules = [rule.split("=") for rule in RENAMED]
    for name in list(trained.gradients):
        new = functools.reduce(lambda text, rule: re.sub(*rule, text), rules, name)
        trained.gradients[new] = trained.gradients.pop(name)
    return trained


def like_original(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of the original and, in float32, the last loss too."""
    return like(right(setup), setup, trained)


def like_clipped(setup: Setup, trained: Trained) -> str:
    return like(clipped(replace(setup, is_faulty=False)), setup, trained)


def like(theirs: Trained, setup: Setup, trained: Trained) -> str:
    wrong = truth.wrong_gradients(setup, truth.whole_gradients(trained), theirs.gradients)
    if wrong or setup.dtype != "float32":
        return truth.said("gradients unlike the original's", wrong)
    apart = truth.error(trained.losses[-1], theirs.losses[-1])
    return truth.said("loss unlike the original's", [f"{apart:.1e}"] if apart > 1e-4 else [])
