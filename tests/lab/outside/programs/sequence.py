"""Tensor and sequence parallelism by hand (Megatron): norms see a part of each sequence.

Gradients of parameters marked `sequence_parallel` are summed. Wrong: a norm was added without it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LENGTH, VOCABULARY, WIDTH, Job, rows, run
from torch import Tensor, nn
from torch.autograd import Function


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def scattered(x: Tensor) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class Gather(Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad)


class Scatter(Function):
    @staticmethod
    def forward(ctx, x):
        return scattered(x)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad)


class Parallel(nn.Module):
    """A linear layer of which each rank holds a part of the rows (or columns) of the weight."""

    def __init__(self, job: Job, inputs: int, outputs: int, dim: int) -> None:
        super().__init__()
        full = torch.randn(outputs, inputs) * inputs**-0.5
        self.weight = nn.Parameter(full.chunk(job.world, dim)[job.rank].clone())
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            return F.linear(Gather.apply(x), self.weight)
        return Scatter.apply(F.linear(x, self.weight))


class Mixer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(Parallel(job, WIDTH, WIDTH, 0) for _ in range(3))
        self.o = Parallel(job, WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in self.qkv]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mixer = Mixer(job)
        self.up, self.down = Parallel(job, WIDTH, 32, 0), Parallel(job, 32, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_1(x))
        return x + self.down(F.silu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(job) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).chunk(dist.get_world_size(), 1)[dist.get_rank()]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Model(job)
    for name, parameter in model.named_parameters():
        forgotten = job.wrong and name == "layers.1.norm_2.weight"
        kinds = ("norm", "embed", "head")
        parameter.sequence_parallel = any(k in name for k in kinds) and not forgotten
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        ids, targets = rows(step, 4)
        logits = model(ids)
        own = targets.chunk(job.world, 1)[job.rank]
        loss = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
        (loss / (4 * LENGTH)).backward()
        for parameter in model.parameters():
            if parameter.sequence_parallel:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    job.keep((n, p) for n, p in model.named_parameters() if "norm" in n or "embed" in n)


run(main)
