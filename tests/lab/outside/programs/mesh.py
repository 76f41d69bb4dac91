"""FSDP2 over tensor parallelism, 2 x 2 (torchtitan).

Wrong: rows are chosen by `rank % dp`, though data parallelism is the outer axis of the mesh: the
two ranks of one tensor-parallel group read other rows.
"""

import torch
import torch.distributed as dist
from common import Gpt, Job, cross_entropy, rows, run, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
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


def main(job: Job) -> None:
    model = Gpt()
    at, parts = 0, 1
    if job.world > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parts, at = 2, mesh.get_local_rank("dp")
        if job.wrong:
            at = dist.get_rank() % parts
        for block in model.blocks:
            assert isinstance(block, nn.Module)
            parallelize_module(block, mesh["tp"], PLAN)
        head = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"head": head})
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        ids, targets = rows(step, 8)
        loss = cross_entropy(model(job.mine(ids, parts, at)), job.mine(targets, parts, at))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep((name, whole(p)) for name, p in model.named_parameters())


run(main)
