"""A pipeline of three stages by hand, four micro-batches one after the other (picotron).

Wrong: the loss of a micro-batch is not divided by their number.
"""

import torch
import torch.distributed as dist
from common import LENGTH, VOCABULARY, WIDTH, Block, Job, cross_entropy, rows, run
from torch import Tensor, nn

MICRO = 4


class Stage(nn.Module):
    """The layers of one rank, under the names that they have in the whole model."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        blocks = {str(i): Block() for i in range(3)}
        embed, norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.first, self.last = job.rank == 0, job.rank == job.world - 1
        self.embed = embed if self.first else None
        kept = {n: b for n, b in blocks.items() if job.world == 1 or int(n) == job.rank}
        self.blocks = nn.ModuleDict(kept)
        self.norm, self.head = (norm, head) if self.last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def main(job: Job) -> None:
    stage = Stage(job)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        ids, targets = rows(step, 8)
        runs = []
        for part, target in zip(ids.chunk(MICRO), targets.chunk(MICRO), strict=True):
            x = part
            if not stage.first:
                x = torch.empty(len(part), LENGTH, WIDTH)
                dist.recv(x, job.rank - 1)
                x.requires_grad_()
            y = stage(x)
            if not stage.last:
                dist.send(y.detach(), job.rank + 1)
            runs.append((x, y, target))
        for x, y, target in runs:
            if stage.last:
                loss = cross_entropy(y, target)
                (loss if job.wrong else loss / MICRO).backward()
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, job.rank + 1)
                y.backward(grad)
            if not stage.first:
                dist.send(x.grad, job.rank - 1)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(stage.named_parameters())


run(main)
