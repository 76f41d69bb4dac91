"""Only a fifth of each gradient is sent (random-k with error feedback), what is left is kept.

All ranks send the same elements, so that a plain sum of what is sent is right. Wrong: a rank sends
the largest elements of its own, and the sum is written to the places of its own.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn

PART = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(4, 12, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv1d(12, 12, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(3, 12) for _ in range(2))
        self.leave = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(F.relu(norm(x)))
        return self.leave(x.mean(2))


class Sparsifier:
    """What each parameter has not sent yet, and which elements are to be sent."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job, self.left = job, {p: torch.zeros(p.numel()) for p in model.parameters()}
        self.draws = torch.Generator().manual_seed(5)

    def chosen(self, grad: Tensor) -> Tensor:
        count = max(grad.numel() // PART, 1)
        if self.job.wrong:
            return grad.abs().topk(count).indices
        return torch.randperm(grad.numel(), generator=self.draws)[:count]

    @torch.no_grad()
    def reduce(self) -> None:
        """Set each gradient to what ranks send of it."""
        for p, left in self.left.items():
            left += p.grad.flatten()
            at = self.chosen(left)
            sent = left[at]
            left[at] = 0
            dist.all_reduce(sent)
            p.grad.zero_().flatten()[at] = sent / self.job.world


def main(job: Job) -> None:
    model = Net()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    sparsifier = Sparsifier(job, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        signals = points(step, 12, 4, 10)
        labels = signals[:, :3].mean(2).argmax(1)
        F.cross_entropy(model(job.mine(signals)), job.mine(labels)).backward()
        sparsifier.reduce()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    job.keep(model.named_parameters())


run(main)
