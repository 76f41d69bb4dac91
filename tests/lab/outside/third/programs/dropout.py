"""Two replicas of two tensor-parallel ranks (Megatron by hand, DDP around), with dropout.

The mask of a sample follows from its number, so that a run is the same on any number of ranks.
Wrong: samples are numbered by rank, though the two ranks of a replica share theirs.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import HEADS, LENGTH, VOCABULARY, WIDTH, Job, cross_entropy
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel


class Enter(Function):
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
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Parallel(nn.Module):
    """A linear layer of which each rank holds some rows (or columns) of the weight."""

    def __init__(self, mesh: DeviceMesh, inputs: int, outputs: int, dim: int) -> None:
        super().__init__()
        whole = torch.randn(outputs, inputs) * inputs**-0.5
        part = whole.chunk(mesh["tp"].size(), dim)[mesh.get_local_rank("tp")]
        self.weight = nn.Parameter(part.clone())
        self.dim, self.group = dim, mesh.get_group("tp")

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            return F.linear(Enter.apply(x, self.group), self.weight)
        return Leave.apply(F.linear(x, self.weight), self.group)


class SampleDropout(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, first: int) -> Tensor:
        if not self.training:
            return x
        masks = []
        for sample in range(first, first + len(x)):
            drawn = torch.Generator().manual_seed(100 * sample + self.number)
            masks.append(torch.rand(x.shape[1:], generator=drawn) < 0.9)
        return x * torch.stack(masks) / 0.9


class Layer(nn.Module):
    def __init__(self, mesh: DeviceMesh, number: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.ModuleList(Parallel(mesh, WIDTH, WIDTH, 0) for _ in range(3))
        self.o = Parallel(mesh, WIDTH, WIDTH, 1)
        self.up, self.down = Parallel(mesh, WIDTH, 32, 0), Parallel(mesh, 32, WIDTH, 1)
        self.dropout_1 = SampleDropout(2 * number + 1)
        self.dropout_2 = SampleDropout(2 * number + 2)

    def forward(self, x: Tensor, first: int) -> Tensor:
        parts = [layer(self.norm_1(x)) for layer in self.qkv]
        q, k, v = [p.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout_1(self.o(y.transpose(1, 2).flatten(2)), first)
        return x + self.dropout_2(self.down(F.gelu(self.up(self.norm_2(x)))), first)


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.dropout = SampleDropout(0)
        self.layers = nn.ModuleList(Layer(mesh, number) for number in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, first: int) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        x = self.dropout(x, first)
        for layer in self.layers:
            x = layer(x, first)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    replicas = 2 if job.world == 4 else 1
    shape = (replicas, job.world // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(Model(mesh), process_group=mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    replica = mesh.get_local_rank("dp")
    for step in range(3):
        ids, targets = [job.mine(whole, replicas, replica) for whole in rows(step, 8)]
        first = 8 * step + len(ids) * (job.rank if job.wrong else replica)
        cross_entropy(model(ids, first), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = ("norm", "embed", "position", "head")
    job.keep((n, p) for n, p in model.module.named_parameters() if any(w in n for w in whole))


run(main)
