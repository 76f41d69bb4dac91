"""Tensor and sequence parallelism with DTensor, the loss split by vocabulary (torch's tutorial).

A learned scale weighs what each part of a layer adds. Norms and scales see a part of every
sequence. Wrong: the plan names the norms, but not the scales, which stay plain parameters.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import HEADS, VOCABULARY, WIDTH, Job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Scale(nn.Module):
    """A factor for each channel (LayerScale)."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.wq, self.wk, self.wv)
        ]
        q, k, v = [part.transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 32, False), nn.Linear(WIDTH, 32, False)
        self.w2 = nn.Linear(32, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention_scale, self.ffn_scale = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_scale(self.attention(self.attention_norm(x)))
        return x + self.ffn_scale(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelized(job: Job, model: Transformer) -> None:
    mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("tp",))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan)
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": whole,
        "attention.w[qkv]": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": whole,
        "feed_forward.w[13]": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    if not job.wrong:
        plan["*_scale"] = SequenceParallel(use_local_output=True)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def main(job: Job) -> None:
    model = Transformer()
    if job.world > 1:
        parallelized(job, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    for step in range(3):
        ids, targets = rows(step, 6)
        if job.world > 1:
            with loss_parallel():
                F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        else:
            F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
