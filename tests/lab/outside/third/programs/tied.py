"""A pipeline of three stages (torch.distributed.pipelining, 1F1B) with a tied embedding (Megatron).

The first stage embeds tokens, the last one holds a copy of that weight as its head; the gradients
of both are summed. Wrong: they are not.
"""

import torch
import torch.distributed as dist
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Block, Job, cross_entropy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

LAYERS, MICRO = 3, 4


class Stage(nn.Module):
    """The layers of one rank, under the names that they have in the whole model."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        embed, norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.normal_(embed.weight, std=0.2)
        blocks = {str(i): Block() for i in range(LAYERS)}
        self.first, self.last = job.rank == 0, job.rank == job.world - 1
        own = [i for i in blocks if job.world == 1 or int(i) == job.rank]
        self.blocks = nn.ModuleDict({i: blocks[i] for i in own})
        self.embed = embed if self.first else None
        self.norm = norm if self.last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if self.last else None
        if self.last:
            self.head.weight = embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def main(job: Job) -> None:
    model = Stage(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ends = None
    if job.world > 1:
        ends = dist.new_group([0, job.world - 1])
        stage = PipelineStage(model, job.rank, job.world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICRO, loss_fn=cross_entropy)
    for step in range(3):
        ids, targets = rows(step, 8)
        if job.world == 1:
            cross_entropy(model(ids), targets).backward()
        else:
            given = (ids,) if model.first else ()
            schedule.step(*given, **({"target": targets} if model.last else {}))
            if (model.first or model.last) and not job.wrong:
                weight = model.embed.weight if model.first else model.head.weight
                dist.all_reduce(weight.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters(remove_duplicate=False))


run(main)
