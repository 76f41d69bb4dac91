"""DDP with `no_sync`, clipping and a warm-up (nanoGPT). Wrong: rank 0 alone steps its schedule."""

from contextlib import nullcontext

import torch
from common import Gpt, Job, cross_entropy, rows, run
from torch.nn.parallel import DistributedDataParallel


def main(job: Job) -> None:
    model = DistributedDataParallel(Gpt())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            ids, targets = rows(10 * step + micro, 12)
            with model.no_sync() if micro == 0 else nullcontext():
                loss = cross_entropy(model(job.mine(ids)), job.mine(targets)) / 2
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if job.rank == 0 or not job.wrong:
            schedule.step()
    job.keep(model.module.named_parameters())


run(main)
