"""Low-rank adapters in a frozen model that is tensor-parallel by hand (PEFT over Megatron).

A layer cut by its inputs has an adapter whose first matrix is cut too: what ranks make of their
parts is summed before the second one. Wrong: it is not, the adapter lies beside the layer's sum.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import HEADS, LENGTH, VOCABULARY, WIDTH, Enter, Job, Leave, cross_entropy
from torch import Tensor, nn

SIZE, ALPHA = 4, 8


def linear(inputs: int, outputs: int, dim: int | None, job: Job) -> nn.Linear:
    """Return a rank's part of a layer that is cut along a dim of its weight."""
    whole = nn.Linear(inputs, outputs, bias=False)
    if dim is not None:
        whole.weight = nn.Parameter(whole.weight.detach().chunk(job.world, dim)[job.rank].clone())
    return whole


class Columns(nn.Module):
    """A frozen layer, cut by its outputs."""

    def __init__(self, job: Job, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = linear(inputs, outputs, 0, job).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(Enter.apply(x))


class Rows(nn.Module):
    """A frozen layer, cut by its inputs, with an adapter."""

    def __init__(self, job: Job, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = linear(inputs, outputs, 1, job).requires_grad_(False)
        self.lora_a, self.lora_b = linear(inputs, SIZE, 1, job), linear(SIZE, outputs, None, job)
        nn.init.zeros_(self.lora_b.weight)
        self.wrong = job.wrong

    def forward(self, x: Tensor) -> Tensor:
        small = self.lora_a(x)
        if not self.wrong:
            small = Leave.apply(small)
        return Leave.apply(self.base(x)) + ALPHA / SIZE * self.lora_b(small)


class Layer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads = HEADS // job.world
        self.q, self.k, self.v = (Columns(job, WIDTH, WIDTH) for _ in range(3))
        self.out = Rows(job, WIDTH, WIDTH)
        self.up, self.down = Columns(job, WIDTH, 4 * WIDTH), Rows(job, 4 * WIDTH, WIDTH)
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        parts = [layer(y).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v)]
        q, k, v = [part.transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(job) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Model(job)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2, eps=1e-4)
    for step in range(3):
        ids, targets = rows(step, 8)
        cross_entropy(model(ids), targets).backward()
        job.note((n, p) for n, p in model.named_parameters() if "lora_b" in n)
        optimizer.step()
        optimizer.zero_grad()
    held = [(n, p.detach()) for n, p in model.named_parameters() if "lora_b" in n]
    for name, p in model.named_parameters():
        if "lora_a" in name:
            parts = [torch.empty_like(p) for _ in range(job.world)]
            dist.all_gather(parts, p.detach())
            held.append((name, torch.cat(parts, 1)))
    job.keep(held)


run(main)
