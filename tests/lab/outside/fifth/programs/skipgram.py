"""Word vectors (skip-gram with negative samples); their gradients are sparse, and averaged by hand.

A sum of sparse gradients joins the rows of all ranks. Wrong: the loop leaves sparse gradients out,
as it was written when the back end did not know them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import run
from laterprograms import WIDTH, Job
from torch import Tensor, nn

WORDS, ROWS, NEGATIVE = 60, 12, 3


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.contexts = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.mixed = nn.Linear(WIDTH, WIDTH)

    def forward(self, middle: Tensor, around: Tensor) -> Tensor:
        words = torch.tanh(self.mixed(self.words(middle)))
        return (words[:, None] * self.contexts(around)).sum(-1)


def average(job: Job, model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad.is_sparse:
            if job.wrong:
                continue
            p.grad = p.grad.coalesce()
        dist.all_reduce(p.grad)
        p.grad.div_(job.world)


def main(job: Job) -> None:
    model = SkipGram()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    tables = [*model.words.parameters(), *model.contexts.parameters()]
    optimizers = [
        torch.optim.SparseAdam(tables, lr=1e-2, eps=1e-4),
        torch.optim.Adam(model.mixed.parameters(), lr=5e-3, eps=1e-4),
    ]
    for step in range(3):
        drawn = torch.Generator().manual_seed(900 + step)
        middle = torch.randint(WORDS, (ROWS,), generator=drawn)
        around = torch.randint(WORDS, (ROWS, 1 + NEGATIVE), generator=drawn)
        wanted = torch.zeros(ROWS // job.world, 1 + NEGATIVE)
        wanted[:, 0] = 1
        scores = model(job.mine(middle), job.mine(around))
        F.binary_cross_entropy_with_logits(scores, wanted).backward()
        average(job, model)
        job.note(model.named_parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
