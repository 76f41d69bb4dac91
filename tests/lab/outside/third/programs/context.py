"""Context parallelism (Llama): ranks have parts of every sequence, and gather keys and values.

Rotary embeddings take the positions of tokens. Wrong: every rank numbers its tokens from 0.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import HEADS, VOCABULARY, WIDTH, Job
from torch import Tensor, nn
from torch.autograd import Function

LENGTH = 12


class Gather(Function):
    """The whole sequence from its parts, `[rows, heads, length, size]`."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous()


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        rates = 100.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions[:, None] * self.rates).repeat(1, 2)
        return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = Gather.apply(k), Gather.apply(v)
        start = dist.get_rank() * q.shape[2]
        at = torch.arange(start, start + q.shape[2])
        mask = torch.arange(k.shape[2])[None, :] <= at[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = [nn.Linear(WIDTH, 24, bias=False) for _ in range(2)]
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    size = LENGTH // job.world
    positions = torch.arange(size)
    if not job.wrong:
        positions = positions + job.rank * size
    for step in range(3):
        ids, targets = [x.chunk(job.world, 1)[job.rank] for x in rows(step, 4, LENGTH)]
        logits = model(ids, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / job.world
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
