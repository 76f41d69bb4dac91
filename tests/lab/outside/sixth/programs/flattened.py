"""A graph network; gradients are averaged by hand in one flat vector.

A rank seeds itself by its number, so rank 0 sends its weights to all, as one vector too. Wrong: the
vector that came is not written back, and each rank trains the weights that it drew.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

GRAPHS, NODES, INPUTS, SIZE, KINDS = 12, 6, 5, 12, 3


class Layer(nn.Module):
    """What a node is, and the mean of what its neighbours are (GraphSAGE)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(inputs, SIZE), nn.Linear(inputs, SIZE, bias=False)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        mean = edges @ x / edges.sum(-1, keepdim=True).clamp(min=1)
        return F.relu(self.norm(self.own(x) + self.near(mean)))


class Net(nn.Module):
    """Gives each graph a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(INPUTS), Layer(SIZE)])
        self.kinds = nn.Linear(SIZE, KINDS)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return self.kinds(x.mean(1))


def graphs(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes, edges and kinds of the graphs of a step."""
    x = points(step, GRAPHS, NODES, INPUTS)
    edges = (points(step + 50, GRAPHS, NODES, NODES) > 0.2).float()
    return x, torch.maximum(edges, edges.mT), x[:, :, :KINDS].sum(1).argmax(1)


def send(model: nn.Module, job: Job) -> None:
    """Give all ranks the weights of rank 0."""
    vector = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(vector, 0)
    if not job.wrong:
        vector_to_parameters(vector, model.parameters())


def average(model: nn.Module) -> None:
    """Average gradients over ranks."""
    vector = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(vector)
    vector /= dist.get_world_size()
    begin = 0
    for p in model.parameters():
        p.grad.copy_(vector[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


def main(job: Job) -> None:
    torch.manual_seed(900 + job.rank)
    model = Net()
    send(model, job)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(3):
        x, edges, kinds = map(job.mine, graphs(step))
        F.cross_entropy(model(x, edges), kinds).backward()
        average(model)
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
