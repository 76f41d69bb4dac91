"""DDP adds two micro-batches up, but an epoch has five. Wrong: the last one is not reduced."""

from contextlib import nullcontext

import torch
from common import Gpt, Job, cross_entropy, rows, run
from torch.nn.parallel import DistributedDataParallel

EVERY, BATCHES = 2, 5


def main(job: Job) -> None:
    model = DistributedDataParallel(Gpt())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(2):
        for batch in range(BATCHES):
            is_full, is_last = (batch + 1) % EVERY == 0, batch + 1 == BATCHES
            reduces = is_full or (is_last and not job.wrong)
            added = BATCHES % EVERY if batch >= BATCHES - BATCHES % EVERY else EVERY
            ids, targets = rows(10 * epoch + batch, 8)
            with nullcontext() if reduces else model.no_sync():
                (cross_entropy(model(job.mine(ids)), job.mine(targets)) / added).backward()
            if is_full or is_last:
                optimizer.step()
                optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
