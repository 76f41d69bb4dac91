"""Embedding, head and loss cut by vocabulary, by hand (Megatron).

Wrong: the embedding does not blank the tokens of other ranks, which look up its first row instead.
"""

import torch
import torch.distributed as dist
from common import VOCABULARY, WIDTH, Block, Job, rows, run
from torch import Tensor, nn
from torch.autograd import Function


class Copy(Function):
    """The same to all ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Reduce(Function):
    """The sum over all ranks, which all go on with."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class VocabularyEmbedding(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        full = 0.3 * torch.randn(VOCABULARY, WIDTH)
        self.weight = nn.Parameter(full.chunk(job.world)[job.rank].clone())
        self.start, self.wrong = job.rank * len(self.weight), job.wrong

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        away = (local < 0) | (local >= len(self.weight))
        x = nn.functional.embedding(local.masked_fill(away, 0), self.weight)
        if not self.wrong:
            x = x.masked_fill(away[..., None], 0.0)
        return Reduce.apply(x)


class VocabularyHead(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        full = torch.randn(VOCABULARY, WIDTH) * WIDTH**-0.5
        self.weight = nn.Parameter(full.chunk(job.world)[job.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(Copy.apply(x), self.weight)


def vocabulary_loss(logits: Tensor, targets: Tensor, start: int) -> Tensor:
    """Return the mean cross-entropy of logits of which each rank has a part."""
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    logits = logits - highest[..., None]
    local = targets - start
    away = (local < 0) | (local >= logits.shape[-1])
    hit = logits.gather(-1, local.masked_fill(away, 0)[..., None]).squeeze(-1)
    total = Reduce.apply(logits.exp().sum(-1))
    return (total.log() - Reduce.apply(hit.masked_fill(away, 0.0))).mean()


class Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed = VocabularyEmbedding(job)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = VocabularyHead(job)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        ids, targets = rows(step, 6)
        vocabulary_loss(model(ids), targets, model.embed.start).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep((n, p) for n, p in model.named_parameters() if "norm" in n or "blocks" in n)


run(main)
