"""Tensor parallelism by hand with grouped queries (Llama): 4 ranks, 4 query heads, 2 key heads.

Two ranks hold the same key and value head, each for another query head, so that its gradient is
the sum of theirs. Wrong: nobody sums it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import LENGTH, VOCABULARY, Enter, Job, Leave, cross_entropy
from torch import Tensor, nn

WIDTH, QUERIES, KEYS, SIZE = 16, 4, 2, 4


class RMSNorm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH, eps=1e-5)


class Attention(nn.Module):
    """The heads of this rank, cut out of the whole weights."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.queries = QUERIES // job.world
        self.keys = max(KEYS // job.world, 1)
        wq, wk = nn.Linear(WIDTH, QUERIES * SIZE), nn.Linear(WIDTH, KEYS * SIZE)
        wv = nn.Linear(WIDTH, KEYS * SIZE)
        wo = nn.Linear(QUERIES * SIZE, WIDTH, bias=False)
        first = job.rank * KEYS // job.world
        self.wq = part(wq, job.rank * self.queries * SIZE, self.queries * SIZE)
        self.wk = part(wk, first * SIZE, self.keys * SIZE)
        self.wv = part(wv, first * SIZE, self.keys * SIZE)
        self.wo = inputs(wo, job.rank * self.queries * SIZE, self.queries * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = Enter.apply(x)
        q, k, v = [
            y.unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for y in (self.wq(x), self.wk(x), self.wv(x))
        ]
        k, v = [y.repeat_interleave(self.queries // self.keys, 1) for y in (k, v)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Leave.apply(self.wo(y.transpose(1, 2).flatten(2)))


def part(whole: nn.Linear, begin: int, size: int) -> nn.Linear:
    """Return some outputs of a layer as a layer of their own."""
    layer = nn.utils.skip_init(nn.Linear, whole.in_features, size)
    layer.weight = nn.Parameter(whole.weight.detach()[begin : begin + size].clone())
    layer.bias = nn.Parameter(whole.bias.detach()[begin : begin + size].clone())
    return layer


def inputs(whole: nn.Linear, begin: int, size: int) -> nn.Linear:
    """Return a layer of some inputs of another; the sum of all such is the whole."""
    layer = nn.utils.skip_init(nn.Linear, size, whole.out_features, bias=False)
    layer.weight = nn.Parameter(whole.weight.detach()[:, begin : begin + size].clone())
    return layer


class Layer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention(job)
        self.ffn_norm = RMSNorm()
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        size = 2 * WIDTH // job.world
        self.up = part(up, job.rank * size, size)
        self.down = inputs(down, job.rank * size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + Leave.apply(self.down(F.silu(self.up(Enter.apply(self.ffn_norm(x))))))


class Llama(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(job) for _ in range(2))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Llama(job)
    pair = None
    if job.world > KEYS:
        held = job.world // KEYS
        pairs = [dist.new_group(list(range(i * held, (i + 1) * held))) for i in range(KEYS)]
        pair = pairs[job.rank // held]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        ids, targets = rows(step, 6, LENGTH)
        cross_entropy(model(ids), targets).backward()
        if pair is not None and not job.wrong:
            for layer in model.layers:
                for linear in (layer.attention.wk, layer.attention.wv):
                    dist.all_reduce(linear.weight.grad, group=pair)
                    dist.all_reduce(linear.bias.grad, group=pair)
        optimizer.step()
        optimizer.zero_grad()
    kept = [(name, p) for name, p in model.named_parameters() if "norm" in name or name[0] == "e"]
    for i, layer in enumerate(model.layers):
        parts = [torch.empty_like(layer.attention.wv.weight) for _ in range(job.world)]
        dist.all_gather(parts, layer.attention.wv.weight.detach())
        kept.append((f"wv.{i}", torch.cat(parts[:: max(job.world // KEYS, 1)])))
    job.keep([*kept, ("head.weight", model.head.weight)])


run(main)
