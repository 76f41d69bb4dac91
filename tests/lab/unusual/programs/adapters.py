"""Small trained parts beside frozen ones, and parts that only some ranks have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    WIDTH,
    Net,
    average,
    backward,
    class_loss,
    normal,
    sgd,
)
from tests.lab.unusual.truths import State, state


class Adapted(nn.Module):
    """A frozen linear layer and a product of two thin ones, the second of which begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.low = nn.Linear(base.in_features, 2, bias=False)
        self.high = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.high(self.low(x))


class AdaptedNet(Net):
    """A frozen net with an adapter in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            layer.up = Adapted(layer.up)


def adapted_net(setup: Setup) -> AdaptedNet:
    model = filled(setup, AdaptedNet)
    for layer in model.layers:
        nn.init.zeros_(layer.up.high.weight)
    return model


def trained_parts(model: nn.Module, but: str = "-") -> list[nn.Parameter]:
    """Return the parameters that train, but for those whose name ends so."""
    return [p for n, p in model.named_parameters() if p.requires_grad and not n.endswith(but)]


def adapters_alone(setup: Setup) -> Trained:
    """One process."""
    model = adapted_net(setup)
    optimizer = torch.optim.SGD(trained_parts(model), lr=0.5)
    return train(
        Trained(model), optimizer, lambda step: backward(class_loss(setup, model, step)), steps=3
    )


def adapters(setup: Setup) -> Trained:
    """Low-rank adapters in a frozen net. Mistake: only the gradients of the second factor are
    averaged; those of the first are zero in the first step."""
    model = adapted_net(setup)
    met = trained_parts(model, "low.weight" if setup.is_faulty else "-")
    optimizer = torch.optim.SGD(trained_parts(model), lr=0.5)
    return train(
        Trained(model),
        optimizer,
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: average(met),
        steps=3,
    )


class Tasked(nn.Module):
    """A trunk that all ranks share, and an adapter and a head of this rank's task."""

    def __init__(self, task: int = 0) -> None:
        super().__init__()
        self.trunk = Net(outside=WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.task = task

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.head(x + torch.tanh(self.adapter(x)))


def tasked(setup: Setup, task: int) -> Tasked:
    """Return the model of one task: the trunk is everybody's, the rest that task's."""
    model = filled(setup, lambda: Tasked(task))
    with torch.no_grad():
        for number, p in enumerate([*model.adapter.parameters(), *model.head.parameters()]):
            p.copy_(0.2 * normal(setup, task, number, 40, shape=tuple(p.shape)))
    return model


def tasks(setup: Setup) -> Trained:
    """Ranks 0 and 1 train one task, 2 and 3 another: the trunk's gradients are averaged over all,
    those of adapters and heads between the two of a task. Mistake: those of adapters over all."""
    task = dist.get_rank() // 2
    group = [dist.new_group(members) for members in ([0, 1], [2, 3])][task]
    model = tasked(setup, task)

    def meet(step: int) -> None:
        average(model.trunk.parameters())
        average(model.adapter.parameters(), None if setup.is_faulty else group)
        average(model.head.parameters(), group)

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


def tasks_written_out(setup: Setup) -> list[State]:
    """Both tasks in one process: two models that step with one trunk."""
    models = [tasked(setup, task) for task in range(2)]
    for step in range(2):
        for model in models:
            model.zero_grad()
        for rank in range(setup.ranks):
            (class_loss(setup, models[rank // 2], step, rank) / 2).backward()
        with torch.no_grad():
            for first, second in zip(*(model.trunk.parameters() for model in models)):
                first.grad = second.grad = (first.grad + second.grad) / 2
        for model in models:
            sgd(model).step()
    return [state(models[rank // 2]) for rank in range(setup.ranks)]


class Headed(nn.Module):
    """A trunk that all ranks share, and a head of this rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Net(outside=WIDTH)
        self.personal = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.personal(self.trunk(x))


def headed(setup: Setup, rank: int) -> Headed:
    model = filled(setup, Headed)
    with torch.no_grad():
        model.personal.weight.copy_(0.3 * normal(setup, rank, 41, shape=(4, WIDTH)))
    return model


def own_rate(rank: int, step: int) -> float:
    """The learning rate of a rank's head."""
    return 0.1 * (1 + rank) / (1 + step)


def rates(setup: Setup) -> Trained:
    """Each rank's head has a schedule of its own; the trunk has one rate. Mistake: on one rank the
    schedule of the head sets the trunk's rate too."""
    rank = dist.get_rank()
    model = headed(setup, rank)
    optimizer = torch.optim.SGD(
        [{"params": list(model.trunk.parameters())}, {"params": list(model.personal.parameters())}],
        lr=0.2,
    )

    def meet(step: int) -> None:
        average(model.trunk.parameters())
        for group in optimizer.param_groups[0 if setup.strikes(rank) else 1 :]:
            group["lr"] = own_rate(rank, step)

    return train(
        Trained(model),
        optimizer,
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


def rates_written_out(setup: Setup) -> list[State]:
    """All ranks in one process."""
    models = [headed(setup, rank) for rank in range(setup.ranks)]
    for step in range(2):
        for rank, model in enumerate(models):
            model.zero_grad()
            class_loss(setup, model, step, rank).backward()
        with torch.no_grad():
            for same in zip(*(model.trunk.parameters() for model in models)):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p -= 0.2 * mean
            for rank, model in enumerate(models):
                for p in model.personal.parameters():
                    p -= own_rate(rank, step) * p.grad
    return [state(model) for model in models]


class Waves(nn.Module):
    """Random features that never train, and what reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(WIDTH, 16).requires_grad_(False)
        self.reader = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(torch.cos(self.features(x)))


def waves_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Waves)
    return train(
        Trained(model),
        sgd(model.reader),
        lambda step: backward(class_loss(setup, model, step)),
    )


def waves(setup: Setup) -> Trained:
    """Random features, frozen, drawn alike on all ranks. Mistake: one rank draws others."""
    rank = dist.get_rank()
    model = filled(setup, Waves)
    if setup.strikes(rank):
        with torch.no_grad():
            model.features.weight.copy_(0.2 * normal(setup, rank, 42, shape=(16, WIDTH)))
    return train(
        Trained(model),
        sgd(model.reader),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: average(model.reader.parameters()),
    )


def thawing_alone(setup: Setup) -> Trained:
    """One process; the first layer trains from the second step on."""
    return thaw(setup, filled(setup, Net), lambda model: None, 1)


def thawing(setup: Setup) -> Trained:
    """A layer is frozen in the first step and handed to the optimizer behind it. Mistake: on one
    rank a step later."""
    first = 2 if setup.strikes(dist.get_rank()) else 1
    return thaw(setup, filled(setup, Net), lambda model: average(trained_parts(model)), first)


def thaw(setup: Setup, model: nn.Module, meet: object, first: int) -> Trained:
    layer = model.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD(trained_parts(model), lr=0.2)

    def follow(step: int) -> None:
        layer.requires_grad_(True)
        if step + 1 == first:
            optimizer.add_param_group({"params": list(layer.parameters())})
        model.zero_grad()

    return train(
        Trained(model),
        optimizer,
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: meet(model),
        after_update=follow,
        steps=3,
    )
