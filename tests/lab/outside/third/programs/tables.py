"""A recommender goes on from a checkpoint (DLRM): whole tables lie on ranks, one after the other.

An all-to-all brings what was looked up to the ranks of the rows. Wrong: it stays in the order in
which ranks sent it, table 0, 3, 1, 4, 2, 5, though the interaction counts tables from 0 to 5.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.autograd import Function

TABLES, ITEMS, SIZE = 6, 20, 8


class Exchange(Function):
    """Send the r-th part to rank r, and back in backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad)
        return out


class Tables(nn.Module):
    """Map item numbers `[rows, tables]` to `[rows, tables, size]`."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        whole = {str(t): nn.Embedding(ITEMS, SIZE) for t in range(TABLES)}
        owned = range(job.rank, TABLES, job.world)
        self.tables = nn.ModuleDict({str(t): whole[str(t)] for t in owned})
        self.world, self.wrong = job.world, job.wrong
        order = [t for rank in range(job.world) for t in range(rank, TABLES, job.world)]
        self.places = [order.index(t) for t in range(TABLES)]

    def forward(self, items: Tensor) -> Tensor:
        batches = [torch.empty_like(items) for _ in range(self.world)]
        dist.all_gather(batches, items.contiguous())
        every = torch.stack(batches)
        own = torch.stack([table(every[..., int(t)]) for t, table in self.tables.items()], 2)
        back = Exchange.apply(own)
        rows = back.transpose(0, 1).flatten(1, 2)
        return rows if self.wrong else rows[:, self.places]


class Interaction(nn.Module):
    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        every = torch.cat([dense[:, None], rows], 1)
        left, right = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        return torch.cat([dense, (every @ every.mT)[:, left, right]], 1)


class Recommender(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, SIZE))
        self.sparse, self.interaction = Tables(job), Interaction()
        pairs = TABLES * (TABLES + 1) // 2
        self.top = nn.Sequential(nn.Linear(SIZE + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, items: Tensor) -> Tensor:
        return self.top(self.interaction(self.bottom(dense), self.sparse(items))).squeeze(-1)


def train(job: Job, model: Recommender, steps: range) -> None:
    shared = [p for n, p in model.named_parameters() if not n.startswith("sparse.")]
    optimizers = [
        torch.optim.Adam(shared, lr=3e-3, eps=1e-5),
        torch.optim.SGD(model.sparse.parameters(), lr=0.5),
    ]
    for step in steps:
        dense = points(step, 12, 5)
        items = (points(step + 300, 12, TABLES).abs() * 7).long() % ITEMS
        clicked = ((items.sum(1) + dense.sum(1)) % 3 > 1).float()
        guess = model(job.mine(dense), job.mine(items))
        loss = F.binary_cross_entropy_with_logits(guess, job.mine(clicked))
        (loss / job.world).backward()
        for p in shared:
            dist.all_reduce(p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def main(job: Job) -> None:
    model = Recommender(job)
    if job.prepare:
        train(job, model, range(3))
        torch.save(model.state_dict(), job.file)
        return
    held = torch.load(job.file)
    model.load_state_dict({name: held[name] for name in model.state_dict()})
    train(job, model, range(3, 6))
    job.keep(model.named_parameters())


run(main)
