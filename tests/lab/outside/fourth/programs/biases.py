"""A masked language model, two replicas (DDP) of two tensor-parallel ranks (Megatron by hand).

A layer that is cut by its inputs adds its bias to the sum of the ranks' parts. Wrong: each rank
adds the bias to its part, so that it counts twice.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import HEADS, LENGTH, VOCABULARY, WIDTH, Job
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

MASK = 0


class Enter(Function):
    """The same to all ranks of a group; their gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(Function):
    """The sum over the ranks of a group."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Tp:
    """The tensor-parallel group of a rank."""

    def __init__(self, job: Job) -> None:
        size = 2 if job.world > 1 else 1
        mesh = init_device_mesh("cpu", (job.world // size, size), mesh_dim_names=("dp", "tp"))
        self.group, self.size, self.rank = mesh["tp"].get_group(), size, mesh["tp"].get_local_rank()
        self.data, self.replica = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
        self.wrong = job.wrong


class Columns(nn.Module):
    """A linear layer, cut by its outputs in `count` equal parts (one each of q, k, v)."""

    def __init__(self, tp: Tp, inputs: int, outputs: int, count: int = 1) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        parts = whole.weight.detach().unflatten(0, (count, tp.size, -1))[:, tp.rank]
        self.weight = nn.Parameter(parts.flatten(0, 1).clone())
        parts = whole.bias.detach().unflatten(0, (count, tp.size, -1))[:, tp.rank]
        self.bias = nn.Parameter(parts.flatten().clone())
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Enter.apply(x, self.tp.group), self.weight, self.bias)


class Rows(nn.Module):
    """A linear layer, cut by its inputs; each rank has the whole bias."""

    def __init__(self, tp: Tp, inputs: int, outputs: int) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(whole.weight.detach().chunk(tp.size, 1)[tp.rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.wrong:
            return Leave.apply(F.linear(x, self.weight, self.bias), self.tp.group)
        return Leave.apply(F.linear(x, self.weight), self.tp.group) + self.bias


class Layer(nn.Module):
    def __init__(self, tp: Tp) -> None:
        super().__init__()
        self.heads = HEADS // tp.size
        self.qkv, self.out = Columns(tp, WIDTH, 3 * WIDTH, 3), Rows(tp, WIDTH, WIDTH)
        self.up, self.down = Columns(tp, WIDTH, 4 * WIDTH), Rows(tp, 4 * WIDTH, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm_1(x + self.out(y))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, tp: Tp) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(tp) for _ in range(2))
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.decoder(x)


def main(job: Job) -> None:
    tp = Tp(job)
    net = Bert(tp)
    model = DistributedDataParallel(net, process_group=tp.data)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-4)
    for step in range(3):
        ids, _ = rows(step, 12)
        hidden = torch.zeros(LENGTH, dtype=torch.bool)
        hidden[[step % LENGTH, (step + 3) % LENGTH]] = True
        wanted = ids.masked_fill(~hidden, -100)
        masked, wanted = [
            job.mine(x, job.world // tp.size, tp.replica)
            for x in (ids.masked_fill(hidden, MASK), wanted)
        ]
        logits = model(masked)
        F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = ("words", "places", "norm", "decoder")
    job.keep([(name, p) for name, p in net.named_parameters() if name.startswith(whole)])


run(main)
