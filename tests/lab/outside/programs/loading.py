"""FSDP2 on three ranks; a checkpoint of the whole model is cut into shards by hand.

Wrong: every rank takes the first rows.
"""

import torch
from common import Gpt, Job, cross_entropy, rows, run, wait_for, whole
from torch import nn
from torch.distributed.fsdp import fully_shard


def load(job: Job, model: nn.Module) -> None:
    held = torch.load(wait_for(job.file))
    for name, parameter in model.named_parameters():
        local, full = parameter.to_local(), held[name]
        start = 0 if job.wrong else job.rank * -(-len(full) // job.world)
        local.detach().copy_(full[start : start + len(local)])


def main(job: Job) -> None:
    torch.manual_seed(job.rank)
    model = Gpt()
    if job.world > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        load(job, model)
    elif not job.prepare:
        model.load_state_dict(torch.load(wait_for(job.file)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        ids, targets = rows(step + 20 * job.prepare, 12)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if job.prepare:
        torch.save(model.state_dict(), job.file)
    job.keep((name, whole(p)) for name, p in model.named_parameters())


run(main)
