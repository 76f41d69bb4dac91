"""FSDP1 with `use_orig_params`, AdamW with a one-cycle schedule, gradients are clipped.

FSDP1 clips with a method of its own, by the norm of all shards. Wrong: `clip_grad_norm_` of
`torch.nn.utils`, which sees this rank's shards alone.
"""

import torch
import torch.distributed as dist
from common import rows, run
from laterprograms import Gpt, Job, cross_entropy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import ShardingStrategy

LIMIT = 0.25


def wrapped(model: Gpt) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Fsdp(block, use_orig_params=True, device_id=torch.device("cpu"))
    return Fsdp(
        model,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )


def main(job: Job) -> None:
    net = Gpt()
    model = wrapped(net) if job.world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=8)
    for step in range(4):
        ids, targets = rows(step, 12)
        loss = cross_entropy(model(job.mine(ids)), job.mine(targets))
        loss.backward()
        if job.world > 1 and not job.wrong:
            norm = model.clip_grad_norm_(LIMIT)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        shown = torch.stack([loss.detach(), norm.detach().float()])
        dist.all_reduce(shown)
        if job.rank == 0 and job.save:
            print(f"step {step}: loss {shown[0] / job.world:.4f}, norm {shown[1] / job.world:.3f}")
    if job.world == 1:
        return job.keep(net.named_parameters())
    with Fsdp.summon_full_params(model):
        names = ((n.replace("_fsdp_wrapped_module.", ""), p) for n, p in model.named_parameters())
        return job.keep([(name, p.clone()) for name, p in names])


run(main)
