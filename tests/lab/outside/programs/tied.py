"""Three stages of `torch.distributed.pipelining`; embedding and head are one weight (GPT-2).

The first and the last stage each have a copy, and sum its gradient. Wrong: they do not.
"""

import torch
import torch.distributed as dist
from common import VOCABULARY, WIDTH, Block, Job, cross_entropy, rows, run
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO = 4


class Part(nn.Module):
    """The layers from `first` to `last`, under the names that they have in the whole model."""

    def __init__(self, first: int, last: int, count: int = 3) -> None:
        super().__init__()
        embed, norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.normal_(embed.weight, std=0.2)
        blocks = {str(i): Block() for i in range(count)}
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        head.weight = embed.weight
        self.embed = embed if first == 0 else None
        self.blocks = nn.ModuleDict({n: b for n, b in blocks.items() if first <= int(n) < last})
        self.norm, self.head = (norm, head) if last == count else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None else x


def main(job: Job) -> None:
    if job.world == 1:
        model = Part(0, 3)
    else:
        model = Part(job.rank, job.rank + 1)
        stage = PipelineStage(model, job.rank, job.world, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, MICRO, loss_fn=cross_entropy)
        ends = dist.new_group([0, job.world - 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        ids, targets = rows(step, 8)
        if job.world == 1:
            cross_entropy(model(ids), targets).backward()
        else:
            first, last = job.rank == 0, job.rank == job.world - 1
            schedule.step(*[ids] * first, **{"target": targets} if last else {})
            shared = model.embed if first else model.head
            if shared is not None and not job.wrong:
                dist.all_reduce(shared.weight.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()
    job.keep((n.replace("head", "embed"), p) for n, p in model.named_parameters())


run(main)
