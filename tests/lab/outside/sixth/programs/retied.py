"""A masked language model (BERT), tensor and sequence parallel by DTensor (torch's tutorial).

Embedding and head are one weight. A plan gives each layer a new parameter, and so parts the two;
the head takes that of the embedding again. Wrong: it does not, and both go on by themselves.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Job, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

MASK, SIZE = 0, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [
            layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        ]
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Attention(), FeedForward()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed(self.norm_2(x))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelized(job: Job, model: Bert) -> None:
    mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("tp",))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm_1": SequenceParallel(),
        "layers.*.attention": whole,
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.norm_2": SequenceParallel(),
        "layers.*.feed": whole,
        "layers.*.feed.up": ColwiseParallel(),
        "layers.*.feed.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    if not job.wrong:
        model.tie()


def main(job: Job) -> None:
    model = Bert()
    if job.world > 1:
        parallelized(job, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    for step in range(3):
        truth, _ = rows(step, 6)
        ids = truth.clone()
        ids[:, step::3] = MASK
        cross_entropy(model(ids), truth).backward()
        job.note(model.named_parameters(remove_duplicate=False))
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters(remove_duplicate=False))


run(main)
