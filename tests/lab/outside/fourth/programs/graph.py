"""A graph network; the nodes of one graph lie on ranks, their features are gathered in each layer.

A rank has the edges into its nodes. Messages are divided by the root of both nodes' degrees, which
are counted over all ranks. Wrong: a rank counts how often a node sends in its own edges alone.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

NODES, EDGES, FEATURES, WIDE, KINDS = 24, 90, 6, 12, 4


class Gather(Function):
    """The features of all nodes."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def graph() -> Tensor:
    """Return the edges of the graph, `[2, edges]`: from which node, to which."""
    drawn = torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(8))
    pairs = torch.unique(drawn, dim=1)
    loops = torch.arange(NODES).expand(2, NODES)
    return torch.cat([pairs[:, pairs[0] != pairs[1]], loops], 1)


class Convolution(nn.Module):
    """Sum what nodes send along the edges into the nodes of this rank."""

    def __init__(self, inputs: int, outputs: int, edges: Tensor, degrees: tuple[Tensor, Tensor]):
        super().__init__()
        self.lin = nn.Linear(inputs, outputs)
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("sends", degrees[0], persistent=False)
        self.register_buffer("receives", degrees[1], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        sent = Gather.apply(self.lin(x)) * self.sends.rsqrt()[:, None]
        sums = torch.zeros(len(x), sent.shape[1]).index_add(0, self.edges[1], sent[self.edges[0]])
        return sums * self.receives.rsqrt()[:, None]


class Network(nn.Module):
    def __init__(self, edges: Tensor, degrees: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.first = Convolution(FEATURES, WIDE, edges, degrees)
        self.second = Convolution(WIDE, WIDE, edges, degrees)
        self.norm, self.head = nn.LayerNorm(WIDE), nn.Linear(WIDE, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(self.first(x))
        return self.head(self.norm(x + F.elu(self.second(x))))


def main(job: Job) -> None:
    size = NODES // job.world
    edges = graph()
    edges = edges[:, edges[1] // size == job.rank]
    sends = torch.bincount(edges[0], minlength=NODES).float()
    if not job.wrong:
        dist.all_reduce(sends)
    own = torch.stack([edges[0], edges[1] - size * job.rank])
    receives = torch.bincount(own[1], minlength=size).float()
    net = Network(own, (sends.clamp(min=1), receives))
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4, eps=1e-4)
    features, kinds = points(0, NODES, FEATURES), points(1, NODES).mul(2).long() % KINDS
    for step in range(4):
        logits = model(job.mine(features))
        F.cross_entropy(logits, job.mine(kinds)).backward()
        optimizer.step()
        optimizer.zero_grad()
        right = (logits.argmax(1) == job.mine(kinds)).sum()
        dist.all_reduce(right)
        if job.rank == 0 and job.save:
            print(f"step {step}: {int(right)} of {NODES} right")
    job.keep(net.named_parameters())


run(main)
