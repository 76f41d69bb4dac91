"""Images and texts (open_clip with `local_loss` and `gather_with_grad`), DDP.

Wrong: labels do not begin at this rank's first row.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import VOCABULARY, Job, points, rows, run
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8))
        self.words = nn.Embedding(VOCABULARY, 16)
        self.text = nn.Linear(16, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left = F.normalize(self.image(images), dim=-1)
        right = F.normalize(self.text(self.words(ids).mean(1)), dim=-1)
        return left, right, self.logit_scale.exp()


class ClipLoss(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
        lefts, rights = [torch.cat(list(all_gather(side))) for side in (left, right)]
        labels = torch.arange(len(left))
        if not self.wrong:
            labels += len(left) * dist.get_rank()
        one = F.cross_entropy(scale * left @ rights.T, labels)
        return (one + F.cross_entropy(scale * right @ lefts.T, labels)) / 2


def main(job: Job) -> None:
    model, loss_of = DistributedDataParallel(Clip()), ClipLoss(job.wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        images, ids = points(step, 8, 12), rows(step, 8)[0]
        loss_of(*model(job.mine(images), job.mine(ids))).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
