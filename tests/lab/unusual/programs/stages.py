"""Pipelines by hand, whose stages are unlike."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import WIDTH, Block, in_one_process, sgd, whole_numbers

TIME, TOKENS = 6, 10


class Front(nn.Module):
    """Tokens [n, time] to [n, time, width], with a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(self.embed(x).transpose(1, 2)).transpose(1, 2))


class Middle(nn.Module):
    """A recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(self.recurrent(x)[0])


class Back(nn.Module):
    """A norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Line(nn.Module):
    """All stages, or the one of a rank."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        kinds = {"front": Front, "middle": Middle, "back": Back}
        for number, (name, kind) in enumerate(kinds.items()):
            if stage in (None, number):
                self.add_module(name, kind())

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.children():
            x = stage(x)
        return x


MICRO = 4


def sentences(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and what follows each, [8, time]."""
    both = whole_numbers(setup, step, 5, below=TOKENS, shape=(8, TIME + 1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def next_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def line_alone(setup: Setup) -> Trained:
    """One process with all stages and the whole batch."""
    model = filled(setup, Line)

    def loss_of(step: int) -> Tensor:
        tokens, targets = sentences(setup, step)
        return next_loss(model(tokens), targets)

    return in_one_process(setup, model, loss_of)


def unlike_stages(setup: Setup) -> Trained:
    """A convolution, a recurrent layer and a head on three ranks: all micro-batches forward, then
    all backward. Mistake: the middle stage clears its gradients in front of each backward."""
    rank, last = dist.get_rank(), setup.ranks - 1
    whole = filled(setup, Line).state_dict()
    model = Line(rank)
    model.load_state_dict({name: whole[name] for name in model.state_dict()})

    def one(step: int) -> Tensor:
        tokens, targets = (half.chunk(MICRO) for half in sentences(setup, step))
        came, made = [], []
        for n in range(MICRO):
            came.append(tokens[n] if rank == 0 else received(tokens[n].shape, rank - 1))
            made.append(model(came[-1]))
            if rank < last:
                dist.send(made[-1].detach().contiguous(), rank + 1)
            else:
                made[-1] = next_loss(made[-1], targets[n]) / MICRO
        for n in range(MICRO):
            if rank == 1 and setup.is_faulty:
                model.zero_grad()
            made[n].backward(None if rank == last else received(tokens[n].shape, rank + 1).detach())
            if rank:
                dist.send(came[n].grad, rank - 1)
        return sum(m.detach() for m in made) if rank == last else torch.zeros(())

    return train(Trained(model), sgd(model), one)


def received(shape: tuple[int, ...], source: int) -> Tensor:
    """Return the message of a neighbour, [*shape, width], which takes a gradient."""
    x = torch.empty(*shape, WIDTH)
    dist.recv(x, source)
    return x.requires_grad_()


class Tied(nn.Module):
    """An embedding, four blocks, and a head with the embedding's weight; or a stage of that."""

    def __init__(self, stage: int | None = None, stages: int = 4) -> None:
        super().__init__()
        is_first, is_last = stage in (None, 0), stage in (None, stages - 1)
        self.embed = nn.Embedding(TOKENS, WIDTH) if is_first else None
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(4) if stage in (None, n)})
        self.head = nn.Linear(WIDTH, TOKENS, bias=False) if is_last else None
        if stage is None:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def tied_alone(setup: Setup) -> Trained:
    """One process, one weight at both ends."""
    model = filled(setup, Tied)

    def loss_of(step: int) -> Tensor:
        tokens, targets = sentences(setup, step)
        return next_loss(model(tokens), targets)

    trained = in_one_process(setup, model, loss_of)
    trained.gradients["head.weight"] = trained.gradients["embed.weight"]
    return trained


def tied_stages(setup: Setup) -> Trained:
    """Four stages by hand, one forward and one backward by turns; the first and the last hold the
    same weight and add its gradients. Mistake: they do not."""
    rank, last = dist.get_rank(), setup.ranks - 1
    ends = dist.new_group([0, last])
    whole = filled(setup, Tied).state_dict()
    model = Tied(rank)
    model.load_state_dict({name: whole[name] for name in model.state_dict()})
    sent: list[dist.Work] = []

    def one(step: int) -> Tensor:
        tokens, targets = (half.chunk(MICRO) for half in sentences(setup, step))
        waiting: list[tuple[Tensor, Tensor]] = []
        losses: list[Tensor] = []

        def forth(n: int) -> None:
            x = tokens[n] if rank == 0 else received(tokens[n].shape, rank - 1)
            made = model(x)
            if rank < last:
                sent.append(dist.isend(made.detach().contiguous(), rank + 1))
            else:
                made = next_loss(made, targets[n]) / MICRO
                losses.append(made.detach())
            waiting.append((x, made))

        def back() -> None:
            x, made = waiting.pop(0)
            made.backward(None if rank == last else received(made.shape[:-1], rank + 1).detach())
            if rank:
                sent.append(dist.isend(x.grad, rank - 1))

        ahead = min(last - rank, MICRO)
        for n in range(ahead):
            forth(n)
        for n in range(ahead, MICRO):
            forth(n)
            back()
        for _ in range(ahead):
            back()
        while sent:
            sent.pop().wait()
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def meet(step: int) -> None:
        if rank in (0, last) and not setup.is_faulty:
            end = model.embed if rank == 0 else model.head
            dist.all_reduce(end.weight.grad, group=ends)

    return train(Trained(model), sgd(model), one, before_update=meet)


class Pooling(nn.Module):
    """[n, time, width] to classes: the mean over places that are no padding, by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        scores = self.score(x)[..., 0].masked_fill(there == 0, -torch.inf)
        return self.head((scores.softmax(-1)[..., None] * x).sum(1))


class Masked(nn.Module):
    """An encoder and a pooling head, or one of them."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.encoder = Front() if stage in (None, 0) else None
        self.pooling = Pooling() if stage in (None, 1) else None

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        x = x if self.encoder is None else self.encoder(x)
        return x if self.pooling is None else self.pooling(x, there)


def classed(setup: Setup, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, which of them are no padding, and classes, of [8, time]."""
    ends = 2 + whole_numbers(setup, step, 6, below=TIME - 2, shape=(8, 1))
    there = (torch.arange(TIME) < ends).float()
    return sentences(setup, step)[0], there, whole_numbers(setup, step, 7, below=4, shape=(8,))


def masked_alone(setup: Setup) -> Trained:
    """One process with both."""
    model = filled(setup, Masked)

    def loss_of(step: int) -> Tensor:
        tokens, there, classes = classed(setup, step)
        return F.cross_entropy(model(tokens, there), classes)

    return in_one_process(setup, model, loss_of)


def masked_stages(setup: Setup) -> Trained:
    """Two stages: the first sends what it made and the mask of padding. Mistake: the mask is not
    sent, and the second takes everything for text."""
    rank = dist.get_rank()
    whole = filled(setup, Masked).state_dict()
    model = Masked(rank)
    model.load_state_dict({name: whole[name] for name in model.state_dict()})

    def one(step: int) -> Tensor:
        tokens, there, classes = (half.chunk(MICRO) for half in classed(setup, step))
        total = torch.zeros(())
        for n in range(MICRO):
            if rank == 0:
                made = model(tokens[n], there[n])
                dist.send(made.detach().contiguous(), 1)
                if not setup.is_faulty:
                    dist.send(there[n].contiguous(), 1)
                made.backward(received(tokens[n].shape, 1).detach())
                continue
            x, mask = received(tokens[n].shape, 0), torch.ones(tokens[n].shape)
            if not setup.is_faulty:
                dist.recv(mask, 0)
            loss = F.cross_entropy(model(x, mask), classes[n]) / MICRO
            loss.backward()
            dist.send(x.grad, 0)
            total += loss.detach()
        return total

    return train(Trained(model), sgd(model), one)
