"""Optimizers and parameters in shards, by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector as flat
from torch.nn.utils import vector_to_parameters as spread

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained
from tests.lab.unusual.material import Net, average, backward, class_loss, gathered, summed


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
