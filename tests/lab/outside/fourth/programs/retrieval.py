"""Questions and passages (two towers, DDP); a question is held to the passages of all ranks.

Passages are gathered with a gradient. Wrong: `dist.all_gather`, after which a rank puts its own
passages back in: the questions of other ranks move them no longer.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, rows, run
from laterprograms import VOCABULARY, WIDTH, Job
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

ROWS, SIZE = 12, 8


class Tower(nn.Module):
    """A text becomes a vector of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, SIZE)

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.outer(F.gelu(self.inner(self.words(ids)))), dim=-1)


class Retriever(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.question, self.passage = Tower(), Tower()

    def forward(self, questions: Tensor, passages: Tensor) -> tuple[Tensor, Tensor]:
        return self.question(questions), self.passage(passages)


def gathered(job: Job, own: Tensor) -> Tensor:
    """Return the vectors of all ranks."""
    if not job.wrong:
        return torch.cat(all_gather(own))
    parts = [torch.empty_like(own) for _ in range(job.world)]
    dist.all_gather(parts, own.detach())
    parts[job.rank] = own
    return torch.cat(parts)


def main(job: Job) -> None:
    net = Retriever()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 6)
    size = ROWS // job.world
    for step in range(4):
        questions, _ = rows(step, ROWS, 5)
        passages, _ = rows(step + 100, ROWS, 9)
        often = job.mine(points(step + 200, ROWS).abs() + 0.1)
        q, p = model(job.mine(questions), job.mine(passages))
        shares = torch.cat([torch.empty_like(often) for _ in range(job.world)])
        dist.all_gather_into_tensor(shares, often)
        scores = q @ gathered(job, p).T / 0.2 - 0.1 * shares.log()
        F.cross_entropy(scores, torch.arange(size) + size * job.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        hits = (scores.argmax(1) == torch.arange(size) + size * job.rank).float().mean()
        dist.all_reduce(hits)
    job.keep(net.named_parameters())


run(main)
