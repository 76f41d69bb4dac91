"""DDP with Lookahead: every second step the weights go half of the way from slow ones to fast ones.

A rank seeds itself by its number, and DDP sends the weights of rank 0 to all. Wrong: the optimizer
is made before that, and the slow weights of each rank are those that it drew.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EVERY, PART = 2, 0.5


class Tagger(nn.Module):
    """A recurrent network that reads both ways and gives each word a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.kinds = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.kinds(self.rnn(self.words(ids))[0])


class Lookahead:
    """Slow weights around an optimizer of fast ones."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.fast = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.fast]

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % EVERY == 0:
            for slow, fast in zip(self.slow, self.fast, strict=True):
                slow.lerp_(fast, PART)
                fast.copy_(slow)


def main(job: Job) -> None:
    torch.manual_seed(600 + job.rank)
    net = Tagger()
    if job.wrong:
        optimizer = Lookahead(torch.optim.RAdam(net.parameters(), lr=1e-2, eps=1e-4))
    model = DistributedDataParallel(net)
    if not job.wrong:
        optimizer = Lookahead(torch.optim.RAdam(net.parameters(), lr=1e-2, eps=1e-4))
    for step in range(4):
        ids, kinds = rows(step, 12)
        logits = model(job.mine(ids))
        F.cross_entropy(logits.flatten(0, 1), job.mine(kinds).flatten()).backward()
        job.note(net.named_parameters())
        optimizer.step()
        net.zero_grad()
    job.keep(net.named_parameters())


run(main)
