"""Programs that split layers into pipeline stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.lab.faults import truth
from tests.lab.faults.model import GPT, batch, loss_of, whole
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import Setup, Trained, train

MICRO_BATCHES = 4


def layers_of(setup: Setup, place: int) -> range:
    """The numbers of a stage's layers; the embeddings and the head count as a layer each, so that
    no stage is empty."""
    units = setup.shape.layers + 2
    first, end = (round(n * units / setup.ranks) - 1 for n in (place, place + 1))
    return range(max(first, 0), min(end, setup.shape.layers))


def stage(setup: Setup, place: int, places: int) -> GPT:
    """This rank's part of the model; its modules keep the names they have in the whole."""
    model = whole(setup)
    for number in range(setup.shape.layers):
        if number not in layers_of(setup, place):
            del model.layers[str(number)]
    if place:
        model.embed = model.positions = None
    if place < places - 1:
        model.norm = model.head = None
    return model


def scheduled(setup: Setup) -> Trained:
    """Stages of torch's own pipelining, whose modules differ from rank to rank."""
    rank, places = dist.get_rank(), setup.ranks
    model = stage(setup, rank, places)
    part = PipelineStage(model, rank, places, torch.device("cpu"))
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=loss_of)

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step)
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if rank == places - 1 else {}
        schedule.step(*([tokens] if rank == 0 else []), **given)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return train(Trained(model), sgd(model), one)


def stages_right(setup: Setup, trained: Trained) -> str:
    """The gradients of all stages together must be those of one process."""
    theirs = truth.reference_gradients(setup)
    wrong = truth.wrong_values(setup, trained.gradients, theirs)
    names: list[set[str]] = [set()] * setup.ranks
    dist.all_gather_object(names, set(trained.gradients))
    missing = sorted(theirs.keys() - set().union(*names))
    return truth.said("on no stage", missing) or truth.said("unlike one process", wrong)


def by_hand(setup: Setup) -> Trained:
    """Stages that send and receive into buffers of their own. Fault: one stage uses the buffer of
    the micro-batch before for the second one."""
    rank, last = dist.get_rank(), setup.ranks - 1
    model = stage(setup, rank, setup.ranks)
    trained = Trained(model)
    rows = setup.shape.batch // MICRO_BATCHES
    shape = (rows, setup.shape.context, setup.shape.hidden)

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step)
        buffers = torch.zeros(MICRO_BATCHES, *shape, dtype=setup.torch_dtype)
        losses = []
        for n, (x, y) in enumerate(zip(tokens.split(rows), targets.split(rows))):
            if rank:
                dist.recv(buffers[n], rank - 1)
                x = buffers[n - 1 if n == 1 and setup.strikes(rank) else n].clone()
                x.requires_grad_()
                trained.note("received", buffers[n])
                trained.note("used", x)
            made = model(x)
            if rank < last:
                dist.send(made.detach(), rank + 1)
                gradient = torch.empty_like(made)
                dist.recv(gradient, rank + 1)
                made.backward(gradient)
            else:
                losses.append(loss_of(made, y) / MICRO_BATCHES)
                losses[-1].backward()
            if rank:
                dist.send(x.grad, rank - 1)
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return train(trained, sgd(model), one)


def buffers_fresh(setup: Setup, trained: Trained) -> str:
    """Every stage must work on what it received, and gradients be those of one process."""
    pairs = zip(trained.seen.get("received", ()), trained.seen.get("used", ()))
    stale = [
        f"rank {dist.get_rank()}, micro-batch {n % MICRO_BATCHES}"
        for n, (received, used) in enumerate(pairs)
        if not torch.equal(received, used)
    ]
    return truth.said("not what was received", truth.united(stale)) or stages_right(setup, trained)
