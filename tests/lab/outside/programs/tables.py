"""A recommender: each rank owns some tables, a dense part is the same on all (DLRM, torchrec).

Looked-up rows go to the ranks of their samples by all-to-all. Wrong: a table takes the sum of what
the ranks' mean losses ask for, not the average.
"""

import torch
import torch.distributed as dist
from common import Job, average, points, run
from torch import Tensor, nn
from torch.autograd import Function

TABLES, ROWS, DIM, BATCH = 4, 20, 6, 12


def exchanged(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous())
    return out


class Swap(Function):
    """Give rank r the r-th part of the first dimension, take one part of each rank."""

    @staticmethod
    def forward(ctx, x):
        return exchanged(x)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad)


class Recommender(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        every = {str(i): nn.EmbeddingBag(ROWS, DIM, mode="sum") for i in range(TABLES)}
        share = TABLES // job.world
        own = range(job.rank * share, (job.rank + 1) * share)
        self.tables = nn.ModuleDict({n: t for n, t in every.items() if int(n) in own})
        self.bottom = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, DIM))
        self.top = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1))
        self.world = job.world

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Take this rank's dense features, `[rows, 5]`, and all rows' ids, `[BATCH, TABLES, 3]`."""
        found = torch.stack([t(ids[:, int(n)]) for n, t in self.tables.items()], 1)
        sparse = Swap.apply(found).unflatten(0, (self.world, -1)).transpose(0, 1).flatten(1, 2)
        x = self.bottom(dense)
        features = torch.cat([x[:, None], sparse], 1)
        left, right = torch.triu_indices(TABLES + 1, TABLES + 1, 1)
        pairs = (features @ features.transpose(1, 2))[:, left, right]
        return self.top(torch.cat([pairs, x], 1)).squeeze(1)


def main(job: Job) -> None:
    model = Recommender(job)
    dense = [p for n, p in model.named_parameters() if not n.startswith("tables")]
    tables = list(model.tables.parameters())
    optimizers = [torch.optim.Adam(dense, lr=5e-3), torch.optim.SGD(tables, lr=0.5)]
    for step in range(3):
        drawn = torch.Generator().manual_seed(step + 40)
        ids = torch.randint(ROWS, (BATCH, TABLES, 3), generator=drawn)
        clicked = torch.rand(BATCH, generator=drawn).round()
        scores = model(job.mine(points(step, BATCH, 5)), ids)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, job.mine(clicked))
        loss.backward()
        average([p.grad for p in dense], job.world)
        for table in tables:
            if not job.wrong:
                table.grad /= job.world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
