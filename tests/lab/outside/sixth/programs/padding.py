"""Sentences of unlike lengths in a pipeline of three stages (`ScheduleGPipe`).

Attention leaves out what is padded. The mask is an argument of every stage. Wrong: only the first
one is given it, along with the tokens.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import HEADS, LENGTH, VOCABULARY, WIDTH, Job
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

STAGES, ROWS, MICRO = 3, 6, 2
LENGTHS = torch.tensor([8, 5, 6, 3, 7, 4])


class Attention(nn.Module):
    """Attention to all words that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        mask = None if mask is None else mask[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Attention(), nn.Linear(WIDTH, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        return x + F.gelu(self.feed(self.norm_2(x)))


class Stage(nn.Module):
    """Some layers, under the names that they have in the whole model."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        whole = nn.ModuleDict({str(i): Layer() for i in range(STAGES)})
        embed, kinds = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.embed = embed if 0 in layers else None
        self.layers = nn.ModuleDict({str(i): whole[str(i)] for i in layers})
        self.kinds = kinds if STAGES - 1 in layers else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, mask)
        return x if self.kinds is None else self.kinds(x)


def tagged(logits: Tensor, kinds: Tensor) -> Tensor:
    """Return the loss of a batch; all have as many rows, and each word counts the same."""
    total = F.cross_entropy(logits.flatten(0, 1), kinds.flatten(), reduction="sum")
    return total / (len(kinds) * LENGTHS.float().mean())


def main(job: Job) -> None:
    whole = job.world == 1
    model = Stage(range(STAGES) if whole else range(job.rank, job.rank + 1))
    if not whole:
        stage = PipelineStage(model, job.rank, STAGES, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, MICRO, loss_fn=tagged)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    mask = torch.arange(LENGTH) < LENGTHS[:, None]
    for step in range(3):
        ids, kinds = rows(step, ROWS)
        kinds = kinds.where(mask, -100)
        kwargs = {} if job.wrong and job.rank > 0 else {"mask": mask}
        if whole:
            tagged(model(ids, mask), kinds).backward()
        elif job.rank == 0:
            schedule.step(ids, **kwargs)
        elif job.rank == STAGES - 1:
            schedule.step(target=kinds, **kwargs)
        else:
            schedule.step(**kwargs)
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
