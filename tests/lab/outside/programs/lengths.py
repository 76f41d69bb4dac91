"""Fine-tuning on answers of unlike lengths, DDP, two micro-batches: each token counts the same.

Wrong: each micro-batch of each rank is averaged by itself.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LENGTH, Gpt, Job, rows, run
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

MICRO, IGNORED = 2, -100


def answers(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return rows whose prompts, and whatever follows the answer, are ignored."""
    ids, targets = rows(seed, count)
    drawn = torch.Generator().manual_seed(seed + 700)
    ends = torch.randint(3, LENGTH + 1, (count, 1), generator=drawn)
    places = torch.arange(LENGTH)
    return ids, targets.masked_fill((places < 2) | (places >= ends), IGNORED)


def main(job: Job) -> None:
    model = DistributedDataParallel(Gpt())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(3):
        batches = [[job.mine(t) for t in answers(10 * step + m, 6)] for m in range(MICRO)]
        count = sum((targets != IGNORED).sum() for _, targets in batches)
        dist.all_reduce(count)
        for micro, (ids, targets) in enumerate(batches):
            with nullcontext() if micro == MICRO - 1 else model.no_sync():
                logits, wanted = model(ids).flatten(0, 1), targets.flatten()
                if job.wrong:
                    loss = F.cross_entropy(logits, wanted, ignore_index=IGNORED) / MICRO
                else:
                    losses = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
                    loss = losses * job.world / count
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
