"""Optimizers and parameters in shards, by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as flat
from torch.nn.utils import vector_to_parameters as spread

from tests.lab.faults.model import cut_from, filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    WIDTH,
    Net,
    average,
    backward,
    class_loss,
    gathered,
    in_one_process,
    labels,
    part,
    rows,
    sgd,
    summed,
)


def adam_alone(setup: Setup) -> Trained:
    """One process with Adam."""
    model = filled(setup, Net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    trained = Trained(model)
    for step in range(3):
        optimizer.zero_grad()
        trained.losses.append(backward(class_loss(setup, model, step)).detach())
        optimizer.step()
    return trained


def flat_shards(setup: Setup) -> Trained:
    """ZeRO-1 by hand: each rank steps its piece of the flat parameters with Adam, and the pieces
    are gathered. Mistake: one rank puts the pieces together one place too far."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    size = sum(p.numel() for p in model.parameters())
    width = -(-size // setup.ranks)
    padded = torch.zeros(width * setup.ranks)
    padded[:size] = flat(model.parameters()).detach()
    shard = padded.chunk(setup.ranks)[rank].clone().requires_grad_()
    optimizer = torch.optim.Adam([shard], lr=0.02)
    trained = Trained(model)
    for step in range(3):
        model.zero_grad()
        loss = backward(class_loss(setup, model, step))
        gradient = torch.zeros_like(padded)
        gradient[:size] = torch.cat([p.grad.flatten() for p in model.parameters()])
        shard.grad = (summed(gradient) / setup.ranks).chunk(setup.ranks)[rank].clone()
        optimizer.step()
        pieces = gathered(shard)
        if setup.strikes(rank) and step == 1:
            pieces = pieces[1:] + pieces[:1]
        spread(torch.cat(pieces)[:size].clone(), model.parameters())
        trained.losses.append(loss.detach())
    return trained


def owned(setup: Setup) -> Trained:
    """Each parameter is stepped by one rank, which then sends it to all. Mistake: one parameter is
    not sent."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    named = list(model.named_parameters())
    owner = {name: number % setup.ranks for number, (name, _) in enumerate(named)}
    optimizer = torch.optim.Adam([p for n, p in named if owner[n] == rank], lr=0.02)
    trained = Trained(model)
    for step in range(3):
        model.zero_grad()
        trained.losses.append(backward(class_loss(setup, model, step)).detach())
        average(model.parameters())
        optimizer.step()
        for name, p in named:
            if not (setup.is_faulty and name == FORGOTTEN):
                dist.broadcast(p.detach(), owner[name])
    return trained


FORGOTTEN = "layers.1.up.weight"


class Gather(torch.autograd.Function):
    """The whole of what ranks hold in pieces; backward averages and keeps this rank's piece."""

    @staticmethod
    def forward(ctx: object, piece: Tensor, is_reducing: bool) -> Tensor:
        ctx.is_reducing = is_reducing
        return torch.cat(gathered(piece))

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ranks = dist.get_world_size()
        if ctx.is_reducing:
            gradient = summed(gradient) / ranks
        return gradient.chunk(ranks)[dist.get_rank()].clone(), None


class FlatLinear(nn.Module):
    """A linear layer whose weight and bias are one flat parameter, of which a rank may have a
    piece."""

    def __init__(self, inside: int, outside: int, parts: int) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.empty(outside * (inside + 1) // parts, 1))
        self.parts, self.outside, self.is_reducing = parts, outside, True

    def forward(self, x: Tensor) -> Tensor:
        whole = Gather.apply(self.flat, self.is_reducing) if self.parts > 1 else self.flat
        table = whole.view(self.outside, -1)
        return F.linear(x, table[:, 1:], table[:, 0])


class FlatNet(nn.Module):
    """Three such layers."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        sizes = ((WIDTH, 16), (16, 16), (16, 4))
        self.layers = nn.ModuleList(FlatLinear(*size, parts) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def flat_alone(setup: Setup) -> Trained:
    """One process with whole parameters."""
    model = filled(setup, FlatNet)
    return in_one_process(setup, model, lambda step: class_loss(setup, model, step))


def gathered_layers(setup: Setup) -> Trained:
    """ZeRO-3 by hand: a layer's parameters are gathered when it runs, and its gradients averaged
    and cut. Mistake: those of the second layer are cut and not averaged."""
    model = FlatNet(setup.ranks)
    cuts = cut_from(filled(setup, FlatNet), model, dist.get_rank(), setup.ranks)
    model.layers[1].is_reducing = not setup.is_faulty
    return train(
        Trained(model, cuts=cuts), sgd(model), lambda step: backward(class_loss(setup, model, step))
    )


def accumulated_alone(setup: Setup) -> Trained:
    """One process with momentum on the whole batch."""
    model = filled(setup, Net)
    return train(
        Trained(model),
        sgd(model, momentum=0.9),
        lambda step: backward(class_loss(setup, model, step)),
        steps=3,
    )


def owned_gradients(setup: Setup) -> Trained:
    """ZeRO-2 by hand: the gradient of a parameter goes to its owner after each of two
    micro-batches; the owner steps and sends the parameter. Mistake: owners do not divide the
    gradients of the last layer by the number of ranks."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    named = list(model.named_parameters())
    owner = {name: number % setup.ranks for number, (name, _) in enumerate(named)}
    optimizer = sgd(model, momentum=0.9)
    trained = Trained(model)
    for step in range(3):
        kept = {n: torch.zeros_like(p) for n, p in named if owner[n] == rank}
        x, y = (part(t, setup).chunk(2) for t in (rows(setup, step), labels(setup, step)))
        for inputs, classes in zip(x, y):
            model.zero_grad()
            loss = backward(F.cross_entropy(model(inputs), classes) / 2)
            for name, p in named:
                dist.reduce(p.grad, owner[name])
                if name in kept:
                    is_whole = setup.is_faulty and name.startswith("leave")
                    kept[name] += p.grad / (1 if is_whole else setup.ranks)
        for name, p in named:
            p.grad = kept.get(name)
        optimizer.step()
        trained.losses.append(loss.detach())
        for name, p in named:
            dist.broadcast(p.detach(), owner[name])
    return trained
