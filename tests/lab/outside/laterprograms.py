"""What the programs of the later sets share: the job, a small GPT, and numbers drawn by set."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, LENGTH, HEADS = 32, 16, 8, 2


@dataclass
class Job:
    """One rank of a program: its number, the size of the job, and what was asked for."""

    rank: int
    world: int
    wrong: bool
    save: str | None
    file: str
    prepare: bool
    first: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the first step, where they were noted."""

    def mine(self, whole: Tensor, parts: int | None = None, part: int | None = None) -> Tensor:
        """Return this rank's rows of a batch."""
        size = whole.shape[0] // (parts or self.world)
        at = self.rank if part is None else part
        return whole[at * size : (at + 1) * size]

    def note(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Note the gradients of the first call of each parameter, for the proof."""
        for name, p in parameters if self.save is not None else ():
            if p.grad is not None and f"grad:{name}" not in self.first:
                self.first[f"grad:{name}"] = full(p.grad.detach()).to_dense().float().clone()

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write what this rank holds at the end, for the proof."""
        held = {name: full(tensor.detach()).float().clone() for name, tensor in tensors}
        if self.save is not None:
            torch.save(self.first | held, f"{self.save}.rank{self.rank}")


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is spread over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Drawing:
    """Where the random numbers of one set of programs begin, alike on every rank."""

    seed: int
    rows_from: int
    points_from: int

    def run(self, main: Callable[[Job], None]) -> None:
        """Start the job, run the program, and leave: the models go before their group."""
        asked = argparse.ArgumentParser()
        asked.add_argument("--wrong", action="store_true", help="the mistake")
        asked.add_argument("--save", help="where to write the last parameters")
        asked.add_argument("--file", default="", help="a checkpoint")
        asked.add_argument("--prepare", action="store_true", help="write the checkpoint and end")
        options = asked.parse_args()
        dist.init_process_group("gloo")
        job = Job(dist.get_rank(), dist.get_world_size(), **vars(options))
        torch.manual_seed(self.seed)
        main(job)
        dist.barrier()
        dist.destroy_process_group()

    def rows(self, step: int, count: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
        """Return the token ids and targets of a step, `[count, length]` each."""
        drawn = torch.Generator().manual_seed(self.rows_from + step)
        ids = torch.randint(VOCABULARY, (count, length + 1), generator=drawn)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def points(self, step: int, *shape: int) -> Tensor:
        """Return normal numbers of a step."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.points_from + step))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same shape."""
        parts = [layer(x) for layer in (self.q, self.k, self.v)]
        q, k, v = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer of the GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, width]` to the same shape."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A language model of a few layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """Map token ids `[rows, length]` to `[rows, length, width]`."""
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids `[rows, length]` to logits `[rows, length, vocabulary]`."""
        return self.head(self.hidden(ids))


class Enter(Function):
    """Into tensor parallelism by hand: the same to all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Leave(Function):
    """Out of tensor parallelism by hand: the sum over ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def some_outputs(whole: nn.Linear, rows: Tensor) -> nn.Linear:
    """Return the layer without bias of some outputs of another; `rows` holds their numbers."""
    layer = nn.utils.skip_init(nn.Linear, whole.in_features, len(rows), bias=False)
    layer.weight = nn.Parameter(whole.weight.detach()[rows].clone())
    return layer


def some_inputs(whole: nn.Linear, columns: Tensor) -> nn.Linear:
    """Return the layer without bias of some inputs of another; the sum of all such is the whole."""
    layer = nn.utils.skip_init(nn.Linear, len(columns), whole.out_features, bias=False)
    layer.weight = nn.Parameter(whole.weight.detach()[:, columns].clone())
    return layer
