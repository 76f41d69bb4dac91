"""Differentially private training (DP-SGD): each sample's gradient is clipped, noise is added.

Every rank adds the same noise to the sum over all ranks. Wrong: it comes from a generator that is
seeded by rank, as those for shuffling and augmentation are.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import nn

CLIP, NOISE, SEED = 1.0, 0.3, 17


class Patients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.SELU(), nn.Linear(16, 8), nn.SELU())
        self.risk = nn.Linear(8, 1)

    def forward(self, records):
        return self.risk(self.layers(records)).squeeze(-1)


def main(job: Job) -> None:
    model = Patients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    noise = torch.Generator().manual_seed(SEED + job.rank if job.wrong else SEED)
    parameters = list(model.parameters())
    for step in range(4):
        records = points(step, 8, 10)
        labels = (records.sum(1) > 0).float()
        total = [torch.zeros_like(p) for p in parameters]
        batch = zip(job.mine(records).split(1), job.mine(labels).split(1), strict=True)
        for record, label in batch:
            loss = F.binary_cross_entropy_with_logits(model(record), label)
            grads = torch.autograd.grad(loss, parameters)
            norm = torch.stack([g.norm() for g in grads]).norm()
            for kept, g in zip(total, grads, strict=True):
                kept += g * (CLIP / (norm + 1e-6)).clamp(max=1.0)
        for p, kept in zip(parameters, total, strict=True):
            dist.all_reduce(kept)
            kept += NOISE * CLIP * torch.randn(kept.shape, generator=noise)
            p.grad = kept / len(records)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
