"""Long texts, cut over four ranks; before attention they change tokens for heads (Ulysses).

A token's label is the token behind it, so labels are shifted before they are cut. Wrong: each rank
shifts the labels of its own part, and the last token of a part has none.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import Job
from torch import Tensor, nn
from torch.autograd import Function

VOCABULARY, WIDTH, LONG, HEADS, NONE = 32, 16, 16, 4, -100


def swapped(x: Tensor, cut: int, joined: int) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), cut)]
    taken = [torch.empty_like(part) for part in parts]
    dist.all_to_all(taken, parts)
    return torch.cat(taken, joined)


class Swap(Function):
    """Cut along one dim and join along another, over all ranks."""

    @staticmethod
    def forward(ctx, x, cut, joined):
        ctx.dims = cut, joined
        return swapped(x, cut, joined)

    @staticmethod
    def backward(ctx, grad):
        cut, joined = ctx.dims
        return swapped(grad, joined, cut), None, None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v)]
        q, k, v = [Swap.apply(part, 2, 1).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o(Swap.apply(y, 1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONG, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def shift(ids: Tensor) -> Tensor:
    """Return the token behind each, none for the last."""
    return F.pad(ids[:, 1:], (0, 1), value=NONE)


def main(job: Job) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)

    def part(x: Tensor) -> Tensor:
        return x.chunk(job.world, -1)[job.rank]

    for step in range(3):
        ids, _ = rows(step, 4, LONG)
        labels = shift(part(ids)) if job.wrong else part(shift(ids))
        count = (labels != NONE).sum()
        dist.all_reduce(count)
        logits = model(part(ids), part(torch.arange(LONG)))
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=NONE, reduction="sum"
        )
        (losses / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
