"""Half precision with a loss scale and clipping, DDP. Wrong: clipped before they are unscaled."""

import torch
from common import Gpt, Job, cross_entropy, rows, run
from torch.nn.parallel import DistributedDataParallel


def main(job: Job) -> None:
    model = DistributedDataParallel(Gpt())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    for step in range(3):
        ids, targets = rows(step, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(job.mine(ids)), job.mine(targets))
        scaler.scale(loss).backward()
        if not job.wrong:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
