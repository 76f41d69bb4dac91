"""Hybrid sharding with FSDP2, two replicas of two shards; gradients are clipped by hand.

Squares of a rank's shards are summed over the ranks that share a replica. Wrong: over the first
axis of the mesh, which holds the ranks with the same shard: each has a norm of its own.
"""

import torch
import torch.distributed as dist
from common import rows, run
from laterprograms import Gpt, Job, cross_entropy, full
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LIMIT = 0.3


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup | None) -> Tensor:
    """Scale gradients so that their norm is no larger than the limit; return the norm."""
    square = torch.stack([local(p.grad).square().sum() for p in parameters]).sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for p in parameters:
        p.grad.mul_((LIMIT / (norm + 1e-6)).clamp(max=1.0))
    return norm


def main(job: Job) -> None:
    model, group = Gpt(), None
    if job.world > 1:
        mesh = init_device_mesh("cpu", (2, job.world // 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        group = mesh.get_group(0 if job.wrong else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    for step in range(3):
        ids, targets = rows(step, 12)
        loss = cross_entropy(model(job.mine(ids)), job.mine(targets))
        loss.backward()
        norm = clip(list(model.parameters()), group)
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if job.rank == 0 and job.save:
            print(
                f"step {step}: loss {float(full(loss.detach())) / job.world:.3f}, norm {norm:.3f}"
            )
    job.keep(model.named_parameters())


run(main)
