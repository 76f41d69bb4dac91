"""Context parallelism inside data parallelism, 2 x 2: keys and values are gathered, rotary angles.

Wrong: the second part of a sequence counts its positions from 0.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import VOCABULARY, WIDTH, FeedForward, Job, rows, run
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh

LONG, DIM = 16, 8


class Gather(Function):
    """Join the parts of a sequence, `[rows, heads, length, dim]`."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        count, at = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(count, 2)[at].contiguous(), None


class Rotary(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        rates = 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
        angles = positions[:, None] * rates
        left, right = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class LongAttention(nn.Module):
    def __init__(self, group: dist.ProcessGroup, wrong: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rotary = Rotary()
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.group, self.wrong = group, wrong

    def forward(self, x: Tensor) -> Tensor:
        start = dist.get_rank(self.group) * x.shape[1]
        places = torch.arange(x.shape[1]) + start
        positions = torch.arange(x.shape[1]) if self.wrong else places
        q, k, v = [t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        mask = places[:, None] >= torch.arange(k.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))


class LongBlock(nn.Module):
    def __init__(self, group: dist.ProcessGroup, wrong: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = LongAttention(group, wrong), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class LongGpt(nn.Module):
    def __init__(self, group: dist.ProcessGroup, wrong: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(LongBlock(group, wrong) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    shape = (2, 2) if job.world == 4 else (1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    at, part = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    model = LongGpt(mesh.get_group("cp"), job.wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        whole = rows(step, 4, LONG)
        ids, targets = [job.mine(t, shape[0], at).chunk(shape[1], 1)[part] for t in whole]
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / (4 * LONG)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
