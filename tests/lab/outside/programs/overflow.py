"""FSDP1 in half precision with a loss scale; one batch overflows.

Wrong: a `GradScaler`, which asks no other rank, in the place of a `ShardedGradScaler`: the rank
whose shard overflowed leaves out its step, the other does not.
"""

import torch
from common import Job, points, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)


def main(job: Job) -> None:
    deep = [nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)]
    nn.init.normal_(deep[-1].weight, std=0.002)
    net = nn.Sequential(*deep)
    model = FullyShardedDataParallel(net, mixed_precision=HALF, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    kind = torch.amp.GradScaler if job.wrong else ShardedGradScaler
    scaler = kind("cpu", init_scale=2.0**10)
    for step in range(4):
        x, y = points(step, 8, 12), points(step + 60, 8, 4)
        if step == 1:
            y[:, 0] = 312.0
        loss = (model(job.mine(x)).float() - job.mine(y)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        job.keep(net.named_parameters())


run(main)
