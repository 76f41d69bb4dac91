"""Translation with FSDP2 and a schedule that is stepped once for each rank (Accelerate).

So a script counts its warm-up in batches of single ranks. Wrong: in steps of the optimizer, and the
rate rises as many times too fast as there are ranks.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Job
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

WARM = 6


class Translator(nn.Module):
    """Two recurrent networks with attention between them; the words of both share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mixed, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, source: Tensor, begun: Tensor) -> Tensor:
        memory, last = self.encoder(self.words(source))
        y, _ = self.decoder(self.words(begun), last)
        weights = (self.query(y) @ memory.transpose(1, 2) / WIDTH**0.5).softmax(-1)
        y = self.norm(torch.tanh(self.mixed(torch.cat([y, weights @ memory], -1))))
        return y @ self.words.weight.T


class EachRank:
    """A schedule that goes on by one for each rank."""

    def __init__(self, schedule: torch.optim.lr_scheduler.LRScheduler, job: Job) -> None:
        self.schedule, self.world = schedule, job.world

    def step(self) -> None:
        for _ in range(self.world):
            self.schedule.step()


def main(job: Job) -> None:
    model = Translator()
    if job.world > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.98), eps=1e-4)
    warm = WARM if job.wrong else WARM * job.world
    rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, 0.1 + 0.9 * n / warm))
    schedule = EachRank(rising, job)
    for step in range(4):
        source, _ = rows(2 * step, 12)
        begun, wanted = rows(2 * step + 1, 12)
        logits = model(job.mine(source), job.mine(begun))
        F.cross_entropy(logits.flatten(0, 1), job.mine(wanted).flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
