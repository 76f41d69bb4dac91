"""A pipeline of three stages (1F1B); every rank has the loader, and takes of a batch what it needs.

The first stage needs tokens, the last one labels. Loaders shuffle, all with one seed. Wrong: each
with the seed of its rank, as in a data-parallel job: the labels belong to other tokens.
"""

import torch
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Block, Job, cross_entropy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

STAGES, ROWS, BATCH, MICRO = 3, 24, 6, 3


class Stage(nn.Module):
    """Some layers, under the names that they have in the whole model."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        whole = nn.ModuleDict({str(i): Block() for i in range(STAGES)})
        embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embed = embed if 0 in layers else None
        self.layers = nn.ModuleDict({str(i): whole[str(i)] for i in layers})
        self.norm, self.head = (nn.LayerNorm(WIDTH), head) if STAGES - 1 in layers else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def main(job: Job) -> None:
    order = torch.Generator().manual_seed(21 + (job.rank if job.wrong else 0))
    loader = DataLoader(TensorDataset(*rows(0, ROWS)), BATCH, shuffle=True, generator=order)
    whole = job.world == 1
    net = Stage(range(STAGES) if whole else range(job.rank, job.rank + 1))
    if not whole:
        stage = PipelineStage(net, job.rank, STAGES, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICRO, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-4)
    for step, (ids, targets) in enumerate(loader):
        if whole:
            cross_entropy(net(ids), targets).backward()
        elif job.rank == 0:
            schedule.step(ids)
        elif job.rank == STAGES - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        job.note(net.named_parameters())
        nn.utils.clip_grad_value_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            break
    job.keep(net.named_parameters())


run(main)
