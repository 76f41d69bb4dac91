"""Tensor parallelism by DTensor with dropout behind each part of a block.

Wrong: `manual_seed(seed + rank)`, as data-parallel programs have it: ranks drop other elements of
the same activations.
"""

import torch
from common import Block, Gpt, Job, cross_entropy, rows, run, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

PLAN = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention_drop, self.feed_forward_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_drop(self.attention(self.attention_norm(x)))
        return x + self.feed_forward_drop(self.feed_forward(self.feed_forward_norm(x)))


def main(job: Job) -> None:
    model = Gpt(0)
    model.blocks = nn.ModuleList(Dropping() for _ in range(2))
    if job.world > 1:
        mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("tp",))
        for block in model.blocks:
            parallelize_module(block, mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(42 + job.rank if job.wrong else 42)
    for step in range(3):
        ids, targets = rows(step, 6)
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep((name, whole(p)) for name, p in model.named_parameters())


run(main)
