"""Programs that split the sequence over context-parallel ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tests.lab.faults import truth
from tests.lab.faults.model import batch, cut_from, loss_of, whole
from tests.lab.faults.parallel import SequenceCut, SequenceParts, average_gradients
from tests.lab.faults.programs.data import parameters_agree, sgd
from tests.lab.faults.setup import Setup, Trained, train


def split_sequence(setup: Setup) -> Trained:
    """Every rank has its own positions of all samples; keys and values are gathered. Fault: one
    rank keeps its own gradient of one weight (it averaged a copy)."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = whole(setup, SequenceParts(group))
    width = setup.shape.context // setup.ranks

    def one(step: int) -> Tensor:
        tokens, targets = (
            half[:, rank * width : (rank + 1) * width] for half in batch(setup, step)
        )
        loss = loss_of(model(tokens, rank * width), targets)
        loss.backward()
        return loss

    chosen = model.layers[str(setup.layer)].attention.o_proj.weight

    def meet(step: int) -> None:
        own = chosen.grad.clone()
        average_gradients(model.parameters(), group, setup.ranks)
        if setup.strikes(rank):
            chosen.grad.copy_(own)

    return train(Trained(model), sgd(model), one, before_update=meet)


def sequence_right(setup: Setup, trained: Trained) -> str:
    """Parameters must stay replicas, and gradients be those of one process."""
    return parameters_agree(setup, trained) or truth.like_one_process(setup, trained)


def split_between_layers(setup: Setup) -> Trained:
    """Tensor parallelism by hand whose norms work on slices of the sequence, so that gradients of
    what is not cut are partial sums. Fault: one norm's is not summed."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = whole(setup, SequenceCut(group))
    trained = Trained(model, cuts=cut_from(whole(setup), model, rank, setup.ranks))
    width = setup.shape.context // setup.ranks
    left_out = f"layers.{setup.layer}.feed_forward_norm.weight" if setup.is_faulty else ""
    shared = [p for n, p in model.named_parameters() if n not in trained.cuts and n != left_out]

    def one(step: int) -> Tensor:
        tokens, targets = (
            half[:, rank * width : (rank + 1) * width] for half in batch(setup, step)
        )
        loss = loss_of(model(tokens, rank * width), targets) / setup.ranks
        loss.backward()
        return loss

    return train(
        trained,
        sgd(model),
        one,
        before_update=lambda step: average_gradients(shared, group, 1.0),
    )


def shared_agree(setup: Setup, trained: Trained) -> str:
    """What is not cut must stay the same everywhere, and gradients be those of one process."""
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    names = truth.differing(kept)
    return truth.said("parameters differ over ranks", names) or truth.like_one_process(
        setup, trained
    )
