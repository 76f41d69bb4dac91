"""FSDP2 with replicas of shards, 2 x 2, rows from a `DistributedSampler` (HSDP).

Wrong: the sampler counts the ranks of one shard group alone, so that both groups read the same.
"""

from collections.abc import Iterator

import torch
from common import Gpt, Job, cross_entropy, rows, run, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 8


def batches(job: Job, count: int, at: int) -> Iterator[list[Tensor]]:
    data = TensorDataset(*rows(7, 3 * BATCH))
    sampler = DistributedSampler(data, num_replicas=count, rank=at, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH // job.world, sampler=sampler)
    return zip(range(3), loader, strict=False)


def main(job: Job) -> None:
    model = Gpt()
    count, at = job.world, job.rank
    if job.world > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if job.wrong:
            count, at = mesh.size(1), mesh.get_local_rank("shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _, (ids, targets) in batches(job, count, at):
        cross_entropy(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep((name, whole(p)) for name, p in model.named_parameters())


run(main)
