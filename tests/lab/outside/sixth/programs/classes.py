"""A U-Net under FSDP2, one group for each of its parts; rare classes weigh more in the loss.

The model gives the loss. How often a class is there is counted once, over the labels of all ranks.
Wrong: each rank counts its own.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

ROWS, SIDE, KINDS, STEPS = 12, 8, 3, 3


class Twice(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, 1, 1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1),
            nn.SiLU(),
        )


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = Twice(1, 6), Twice(6, 12)
        self.widen = nn.ConvTranspose2d(12, 6, 2, 2)
        self.up, self.kinds = Twice(12, 6), nn.Conv2d(6, KINDS, 1)
        self.criterion = nn.CrossEntropyLoss(torch.ones(KINDS), reduction="none")

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        high = self.down(images)
        low = self.widen(self.middle(F.max_pool2d(high, 2)))
        kinds = self.kinds(self.up(torch.cat([high, low], 1)))
        return self.criterion(kinds, labels).mean(), kinds


def pictures(step: int, job: Job) -> tuple[Tensor, Tensor]:
    """Return this rank's images of a step, and the kind of each of their points."""
    images = points(step, ROWS, 1, SIDE, SIDE) + torch.linspace(-1, 1, ROWS)[:, None, None, None]
    labels = torch.bucketize(images[:, 0], torch.tensor([0.3, 1.4]))
    return job.mine(images), job.mine(labels)


def weigh(criterion: nn.CrossEntropyLoss, job: Job) -> None:
    """Give each class a weight."""
    labels = torch.cat([pictures(step, job)[1] for step in range(STEPS)])
    counts = labels.flatten().bincount(minlength=KINDS).float()
    if not job.wrong:
        dist.all_reduce(counts)
    criterion.weight.copy_(counts.sum() / (KINDS * counts))


def main(job: Job) -> None:
    model = Unet()
    weigh(model.criterion, job)
    if job.world > 1:
        for part in (model.down, model.middle, model.up):
            fully_shard(part)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(STEPS):
        loss, _ = model(*pictures(step, job))
        loss.backward()
        job.note(model.named_parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep([*model.named_parameters(), *model.named_buffers()])


run(main)
