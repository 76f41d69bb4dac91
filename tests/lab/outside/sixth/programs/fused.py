"""Gated layers, tensor-parallel by hand; gate and rise are one matrix (Phi).

A rank takes some rows of the gate and the same ones of the rise. Wrong: it takes so many rows of
the matrix in one piece, so that the first rank has all of the gate, the second all of the rise.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import (
    VOCABULARY,
    WIDTH,
    Enter,
    Job,
    Leave,
    cross_entropy,
    some_inputs,
    some_outputs,
)
from torch import Tensor, nn

SIZE = 32


class Gated(nn.Module):
    """The part of this rank, cut out of the whole."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        gate_up = nn.Linear(WIDTH, 2 * SIZE, bias=False)
        down = nn.Linear(SIZE, WIDTH, bias=False)
        own = job.mine(torch.arange(SIZE))
        taken = job.mine(torch.arange(2 * SIZE)) if job.wrong else torch.cat([own, SIZE + own])
        self.gate_up, self.down = some_outputs(gate_up, taken), some_inputs(down, own)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(Enter.apply(x)).chunk(2, -1)
        return Leave.apply(self.down(F.silu(gate) * up))


class Layer(nn.Module):
    """Mixes words by their order, then each by itself."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mlp = Gated(job)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm_1(x))[0]
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(job) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Model(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    whole = [(name, p) for name, p in model.named_parameters() if ".mlp." not in name]
    for step in range(3):
        ids, targets = rows(step, 6)
        cross_entropy(model(ids), targets).backward()
        job.note(whole)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(whole)


run(main)
