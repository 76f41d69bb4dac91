"""Data-parallel training loops that go around the wrapper that should have reduced gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.lab.faults import truth
from tests.lab.faults.model import batch, loss_of, whole
from tests.lab.faults.parallel import SequenceParts, average_gradients
from tests.lab.faults.programs.data import replicas_agree, sgd, step_of
from tests.lab.faults.programs.ports import PADDED, padded
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.real.programs.shards import accumulated, as_one_process, classifier, rows_of

right = replicas_agree


def halves(setup: Setup, step: int) -> list[tuple[Tensor, Tensor]]:
    """The two micro-batches of this rank."""
    tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
    return list(zip(tokens.chunk(2), targets.chunk(2)))


def flag_after_forward(setup: Setup) -> Trained:
    """DDP with accumulation by its flag. Bug: the flag is set between forward and backward, and the
    forward before was what prepares the reduction."""
    model = whole(setup)
    wrapped = DDP(model)

    def one(step: int) -> Tensor:
        losses = []
        for n, (x, y) in enumerate(halves(setup, step)):
            if not setup.is_faulty:
                wrapped.require_backward_grad_sync = n == 1
            losses.append(loss_of(wrapped(x), y) / 2)
            wrapped.require_backward_grad_sync = n == 1
            losses[-1].backward()
        return torch.stack(losses).sum()

    return train(Trained(model), sgd(model), one)


class ManualStep(nn.Module):
    """A training step whose backward is called by the user, inside of the wrapper's forward."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(
        self, tokens: Tensor, targets: Tensor, backward: Callable[[Tensor], None]
    ) -> Tensor:
        loss = loss_of(self.gpt(tokens), targets)
        backward(loss)
        return loss.detach()


def static_graph(setup: Setup) -> Trained:
    """DDP with a static graph under a trainer that lets the user call backward. Bug: what queues
    the first reduction hangs on the output of the wrapper, which nobody goes back from; the twin
    queues it by hand."""
    model = whole(setup)
    wrapped = DDP(ManualStep(model), static_graph=True)
    queued: list[int] = []

    def backward(loss: Tensor) -> None:
        wrapped.reducer.prepare_for_backward([])
        loss.backward()
        if not setup.is_faulty and not queued:
            wrapped.reducer._delay_all_reduce()
            queued.append(1)
        wrapped.require_backward_grad_sync = False  # the wrapper has nothing left to prepare

    def one(step: int) -> Tensor:
        wrapped.require_backward_grad_sync = True
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        return wrapped(tokens, targets, backward)

    return train(Trained(model), sgd(model), one)


def replaced_parameter(setup: Setup) -> Trained:
    """DDP. Bug: the head's weight is set anew after the wrapper was built, which watches the old
    one; the twin sets it before."""
    model = whole(setup)

    def renew() -> None:
        torch.manual_seed(800 + setup.seed)
        model.head.weight = nn.Parameter(torch.randn_like(model.head.weight) * 0.2)

    if not setup.is_faulty:
        renew()
    wrapped = DDP(model, find_unused_parameters=True)
    if setup.is_faulty:
        renew()
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def replaced_right(setup: Setup, trained: Trained) -> str:
    """Parameters after training must be the same on all ranks, gradients those of one process."""
    alone = whole(setup)
    torch.manual_seed(800 + setup.seed)
    alone.head.weight = nn.Parameter(torch.randn_like(alone.head.weight) * 0.2)
    names = truth.differing(dict(trained.model.named_parameters()))
    theirs = truth.reference_gradients(setup, alone)
    return truth.said("parameters differ over ranks", names) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, trained.gradients, theirs)
    )


def unfrozen_later(setup: Setup) -> Trained:
    """Fine-tuning under DDP: one layer is thawed after the first step. Bug: it was frozen when the
    wrapper was built, which watches only what has gradients then."""
    model = whole(setup)
    layer = model.layers[str(setup.layer)]
    layer.requires_grad_(not setup.is_faulty)
    wrapped = DDP(model, find_unused_parameters=True)

    def one(step: int) -> Tensor:
        layer.requires_grad_(step > 0)
        return step_of(setup, wrapped, step)

    return train(Trained(model), sgd(model), one)


def stays_replicated(setup: Setup, trained: Trained) -> str:
    """Parameters after training must be the same on all ranks."""
    names = truth.differing(dict(trained.model.named_parameters()))
    return truth.said("parameters differ over ranks", names)


def low_rank_side(setup: Setup) -> Trained:
    """Low-rank adapters in a network of their own, under DDP, while the frozen model's layers have
    their `forward` replaced. Bug: nobody calls the wrapper, so nothing is reduced; the twin reduces
    by hand."""
    host = classifier(setup)
    host.requires_grad_(False)
    network = Adapters(host)
    wrapped = DDP(network)

    def meet(step: int) -> None:
        if not setup.is_faulty:
            average_gradients(network.parameters(), dist.group.WORLD, setup.ranks)

    def one(step: int) -> Tensor:
        x, y = rows_of(setup, step, dist.get_rank(), setup.ranks)
        loss = F.cross_entropy(host(x), y)
        loss.backward()
        return loss

    return train(Trained(network), sgd(wrapped), one, before_update=meet)


class Adapter(nn.Module):
    """What is added to one linear layer: [.., inside] by way of two features to [.., outside]."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class Adapters(nn.Module):
    """An adapter for every linear layer of a model, put in place of the layers' `forward`."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.fc1, self.fc2 = Adapter(host.fc1), Adapter(host.fc2)
        for layer, adapter in ((host.fc1, self.fc1), (host.fc2, self.fc2)):
            layer.forward = added(layer.forward, adapter)


def added(forward: Callable[[Tensor], Tensor], adapter: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(x) + adapter(x)


def adapters_right(setup: Setup, trained: Trained) -> str:
    """Adapters must stay the same on all ranks, with the gradients of one process."""
    names = truth.differing(dict(trained.model.named_parameters()))
    torch.manual_seed(40 + setup.seed)
    host = classifier(setup)
    host.requires_grad_(False)
    alone = Adapters(host)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parameter.copy_(trained.before[name])
    as_one_process(setup, host)
    theirs = {n: p.grad for n, p in alone.named_parameters()}
    return truth.said("parameters differ over ranks", names) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, trained.gradients, theirs)
    )


def never_finished(setup: Setup) -> Trained:
    """Gradients are gathered in buffers that a call at the end of backward reduces. Bug: the
    example script never makes that call."""
    model = whole(setup)

    def finish(step: int) -> None:
        if not setup.is_faulty:
            average_gradients(model.parameters(), dist.group.WORLD, setup.ranks)

    return train(
        Trained(model), sgd(model), lambda step: step_of(setup, model, step), before_update=finish
    )


def wiped_between(setup: Setup) -> Trained:
    """Two micro-batches a step. Bug: what prepares the second one frees the gradients of the
    first."""
    model = whole(setup)

    calls = itertools.count(1)

    def wipe() -> None:
        if next(calls) % 2 and setup.is_faulty:
            model.zero_grad()

    return train(
        Trained(model),
        sgd(model),
        lambda step: accumulated(setup, model, step, after=wipe),
        before_update=lambda step: average_gradients(
            model.parameters(), dist.group.WORLD, setup.ranks
        ),
    )


def own_count(setup: Setup) -> Trained:
    """DDP on rows with padding. Bug: every rank divides its loss by its own number of tokens, then
    ranks with few tokens weigh as much as those with many."""
    model = whole(setup)
    wrapped = DDP(model)

    def one(step: int) -> Tensor:
        tokens, targets = padded(setup, step, dist.get_rank(), setup.ranks)
        summed = F.cross_entropy(wrapped(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        count = (targets != PADDED).sum().float()
        if not setup.is_faulty:
            dist.all_reduce(count)
            count /= setup.ranks
        loss = summed / count
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)


def weighed_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process that divides by all tokens."""
    alone = whole(setup)
    tokens, targets = padded(setup, 0, 0, 1)
    F.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten()).backward()
    theirs = {n: p.grad for n, p in alone.named_parameters()}
    names = truth.wrong_gradients(setup, trained.gradients, theirs)
    return truth.said("gradients unlike one process", names)


def sequence_left_out(setup: Setup) -> Trained:
    """DDP beside a split sequence. Bug: DDP reduces over the ranks that have other rows, of which
    there is one, and not over those that share the sequence."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = whole(setup, SequenceParts(group))
    alone = [dist.new_group([n]) for n in range(setup.ranks)]
    wrapped = DDP(model, process_group=alone[rank] if setup.is_faulty else group)
    width = setup.shape.context // setup.ranks

    def one(step: int) -> Tensor:
        tokens, targets = (
            half[:, rank * width : (rank + 1) * width] for half in batch(setup, step)
        )
        loss = loss_of(wrapped(tokens, rank * width), targets)
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)
