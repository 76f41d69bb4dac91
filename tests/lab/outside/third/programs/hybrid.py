"""Hybrid sharding with FSDP2, 2 x 2; the loss is a sum over tokens divided by their number (titan).

Gradients then have to be summed, so that no FSDP module may divide them. Wrong: only the root is
told, and each block still averages its gradients.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, rows, run
from laterprograms import Gpt, Job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def main(job: Job) -> None:
    model = Gpt(3)
    if job.world > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                if module is model or not job.wrong:
                    module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
    for step in range(4):
        ids, targets = rows(step, 8)
        targets = targets.masked_fill(points(step, *targets.shape) > 0.8, -100)
        ids, targets = job.mine(ids), job.mine(targets)
        count = (targets != -100).sum()
        dist.all_reduce(count)
        logits = model(ids).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    job.keep(model.named_parameters())


run(main)
