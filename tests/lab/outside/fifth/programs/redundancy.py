"""DDP with torch's `ZeroRedundancyOptimizer`, which goes on from a checkpoint.

Before it was saved, the state was brought together on rank 0. Each rank loads it and keeps what it
owns. Wrong: rank 0 alone, since it was the one that saved; others begin with new moments.
"""

import torch
from common import rows, run
from laterprograms import Gpt, Job, cross_entropy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def trained(job: Job, net: Gpt, optimizer: ZeroRedundancyOptimizer, steps: range) -> None:
    model = DistributedDataParallel(net)
    for step in steps:
        ids, targets = rows(step, 12)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        job.note(net.named_parameters())
        optimizer.step()
        optimizer.zero_grad()


def main(job: Job) -> None:
    net = Gpt()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=4e-3, weight_decay=0.1, eps=1e-5
    )
    if job.prepare:
        trained(job, net, optimizer, range(3))
        optimizer.consolidate_state_dict(to=0)
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, job.file)
        return
    saved = torch.load(job.file, weights_only=True)
    net.load_state_dict(saved["model"])
    if job.rank == 0 or not job.wrong:
        optimizer.load_state_dict(saved["optimizer"])
    trained(job, net, optimizer, range(3, 6))
    job.keep(net.named_parameters())


run(main)
