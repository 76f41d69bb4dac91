"""Momentum contrast (MoCo) in DDP: a query is held to its key and to a queue of older keys.

Keys of all ranks enter the queue, in one order. Wrong: a rank puts in those of its own alone.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, INPUTS, SIZE, KEYS = 12, 10, 8, 60


class Contrast(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(INPUTS, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, SIZE)
        )
        self.follower = deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(SIZE, KEYS), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.job = job

    @torch.no_grad()
    def follow(self) -> None:
        for old, new in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        if not self.job.wrong:
            parts = [torch.empty_like(keys) for _ in range(self.job.world)]
            dist.all_gather(parts, keys.contiguous())
            keys = torch.cat(parts)
        begin = int(self.place)
        self.queue[:, begin : begin + len(keys)] = keys.T
        self.place[0] = (begin + len(keys)) % KEYS

    def forward(self, view: Tensor, other: Tensor) -> Tensor:
        queries = F.normalize(self.encoder(view), dim=1)
        with torch.no_grad():
            self.follow()
            keys = F.normalize(self.follower(other), dim=1)
        right = (queries * keys).sum(1, keepdim=True)
        scores = torch.cat([right, queries @ self.queue.clone()], 1) / 0.2
        self.enqueue(keys)
        return scores


def main(job: Job) -> None:
    net = Contrast(job)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.encoder.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    for step in range(4):
        data = points(step, ROWS, INPUTS)
        views = [data + 0.3 * points(step + 50 * i, ROWS, INPUTS) for i in (1, 2)]
        scores = model(*map(job.mine, views))
        F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long)).backward()
        job.note(net.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep([*net.named_parameters(), *net.named_buffers()])


run(main)
