"""FSDP2 over two replicas of two shards (HSDP), two micro-batches a step.

Shards are reduced after each micro-batch, replicas after the last one. Wrong: for the last one only
the root is told so (`recurse=False`), and blocks never have a gradient.
"""

import torch
from common import rows, run
from laterprograms import Gpt, Job, cross_entropy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MICRO = 2


def main(job: Job) -> None:
    model = Gpt()
    if job.world > 1:
        mesh = init_device_mesh("cpu", (2, job.world // 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    for step in range(3):
        for micro in range(MICRO):
            if job.world > 1:
                last = micro == MICRO - 1
                model.set_requires_all_reduce(last, recurse=not (last and job.wrong))
            ids, targets = rows(MICRO * step + micro, 12)
            (cross_entropy(model(job.mine(ids)), job.mine(targets)) / MICRO).backward()
        job.note(model.named_parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
