"""Translation, tensor-parallel by hand (T5 in Megatron): the decoder reads what the encoder wrote.

What enters a layer that is cut by heads has its gradient summed over ranks. Wrong: in attention to
the source this is done with the decoder's vectors, but not with the encoder's.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Enter,
    Job,
    Leave,
    cross_entropy,
    some_inputs,
    some_outputs,
)
from torch import Tensor, nn

HEADS = 4


def some(whole: int, job: Job) -> Tensor:
    """Return the numbers of what this rank has of so many."""
    return job.mine(torch.arange(whole))


class Attention(nn.Module):
    """The heads of this rank, from one sequence to another or to itself."""

    def __init__(self, job: Job, causal: bool = False) -> None:
        super().__init__()
        q, k, v, o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        own = some(WIDTH, job)
        self.q, self.k, self.v = (some_outputs(whole, own) for whole in (q, k, v))
        self.o = some_inputs(o, own)
        self.causal = causal
        self.forgets = job.wrong

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        x = Enter.apply(x)
        if source is None:
            source = x
        elif not self.forgets:
            source = Enter.apply(source)
        parts = (self.q(x), self.k(source), self.v(source))
        q, k, v = [part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return Leave.apply(self.o(y.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up = some_outputs(up, some(2 * WIDTH, job))
        self.down = some_inputs(down, some(2 * WIDTH, job))

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(self.down(F.relu(self.up(Enter.apply(x)))))


class Encoder(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.itself, self.feed = Attention(job), FeedForward(job)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.itself(self.norm_1(x))
        return x + self.feed(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.itself, self.cross = Attention(job, causal=True), Attention(job)
        self.feed = FeedForward(job)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        x = x + self.itself(self.norm_1(x))
        x = x + self.cross(self.norm_2(x), source)
        return x + self.feed(self.norm_3(x))


class Translator(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.encoder = nn.ModuleList(Encoder(job) for _ in range(2))
        self.between = nn.RMSNorm(WIDTH)
        self.decoder = nn.ModuleList(Decoder(job) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        y = self.source(source) + self.position
        for layer in self.encoder:
            y = layer(y)
        y, x = self.between(y), self.target(target) + self.position
        for layer in self.decoder:
            x = layer(x, y)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Translator(job)
    cut = (".itself.", ".cross.", ".feed.")
    whole = [(n, p) for n, p in model.named_parameters() if not any(part in n for part in cut)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        source, _ = rows(step, 6)
        target, truth = rows(step + 50, 6)
        cross_entropy(model(source, target), truth).backward()
        job.note(whole)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(whole)


run(main)
