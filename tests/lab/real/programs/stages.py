"""Pipelines by hand: two stages, one micro-batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.faults import truth
from tests.lab.faults.model import batch, loss_of, whole
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import Setup, Trained, train


def tied_model(setup: Setup) -> nn.Module:
    model = whole(setup)
    model.head.weight = model.embed.weight
    return model


def stage_of(setup: Setup, rank: int) -> nn.Module:
    """The first layer with the embedding, or the others with the head, which has the embedding's
    weight."""
    model = tied_model(setup)
    first = rank == 0
    keep = [n for n in model.layers if (n == "0") == first]
    model.layers = nn.ModuleDict({n: model.layers[n] for n in keep})
    if first:
        model.norm = model.head = None
    else:
        model.embed = model.positions = None
    return model


def tied_over_stages(setup: Setup) -> Trained:
    """Embedding and head share their weight and lie on two stages. Bug: nobody sums the gradients
    of the two copies."""
    rank = dist.get_rank()
    model = stage_of(setup, rank)
    shape = setup.shape
    shared = model.embed.weight if rank == 0 else model.head.weight

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step)
        carried = torch.empty(shape.batch, shape.context, shape.hidden)
        if rank == 0:
            made = model(tokens)
            dist.send(made.detach().contiguous(), 1)
            dist.recv(carried, 1)
            made.backward(carried)
            return made.detach().sum()
        dist.recv(carried, 0)
        carried.requires_grad_()
        loss = loss_of(model(carried), targets)
        loss.backward()
        dist.send(carried.grad.contiguous(), 0)
        return loss

    def meet(step: int) -> None:
        if not setup.is_faulty:
            dist.all_reduce(shared.grad)

    return train(Trained(model), sgd(model), one, before_update=meet)


def copies_agree(setup: Setup, trained: Trained) -> str:
    """Both copies must have the gradient of one process, and be the same after training."""
    model = trained.model
    name = "embed.weight" if dist.get_rank() == 0 else "head.weight"
    copies = truth.differing({"the shared weight": dict(model.named_parameters())[name]})
    theirs = truth.reference_gradients(setup, tied_model(setup))
    theirs["head.weight"] = theirs["embed.weight"]
    return truth.said("two copies", copies) or truth.said(
        "gradients unlike one process", truth.wrong_values(setup, trained.gradients, theirs)
    )
