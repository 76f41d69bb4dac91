"""Mixtures of experts: experts on other ranks, losses and biases that balance them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import filled
from tests.lab.faults.parallel import Exchange
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    WIDTH,
    average,
    averaged,
    backward,
    class_loss,
    in_one_process,
    labels,
    part,
    rows,
    sgd,
)

EXPERTS = 4


class Mixture(nn.Module):
    """Each row goes to one of four experts, which one process has all of."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(EXPERTS)})
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.shares = torch.zeros(EXPERTS)
        self.chosen = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        chosen = (shares.detach() + self.bias).argmax(-1)
        self.shares, self.chosen = shares.mean(0), F.one_hot(chosen, EXPERTS).float().mean(0)
        weight = shares.gather(1, chosen[:, None])
        return x + weight * self.of_experts(x, chosen)

    def of_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for number, expert in self.experts.items():
            is_its = chosen == int(number)
            made = made.index_put((is_its.nonzero()[:, 0],), expert(x[is_its]))
        return made


class FarMixture(Mixture):
    """Some experts are here; rows travel to their experts and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.is_disordered = group, False
        count = EXPERTS // dist.get_world_size(group)
        first = count * dist.get_rank(group)
        self.experts = nn.ModuleDict(
            {n: e for n, e in self.experts.items() if first <= int(n) < first + count}
        )

    def of_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        ranks = dist.get_world_size(self.group)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        gives, takes = (c.view(ranks, -1).sum(1).tolist() for c in (counts, incoming))
        came = Exchange.apply(x[order], gives, takes, self.group)
        numbers = torch.tensor([int(n) for n in self.experts]).repeat(ranks)
        made = super().of_experts(came, numbers.repeat_interleave(incoming))
        back = Exchange.apply(made, takes, gives, self.group)
        return back[order] if self.is_disordered else back[order.argsort()]


class Routed(nn.Module):
    """Rows [n, width] to classes, through a mixture."""

    def __init__(self, *group: dist.ProcessGroup) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.mixture = FarMixture(*group) if group else Mixture()
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.mixture(torch.tanh(self.enter(x))))


def routed_alone(setup: Setup) -> Trained:
    """One process with all experts."""
    model = filled(setup, Routed)
    return in_one_process(setup, model, lambda step: class_loss(setup, model, step))


def routed_model(setup: Setup, group: dist.ProcessGroup) -> Routed:
    """Return this rank's part of the model."""
    model = Routed(group)
    whole = filled(setup, Routed).state_dict()
    model.load_state_dict({name: whole[name] for name in model.state_dict()})
    return model


def far_experts(setup: Setup) -> Trained:
    """Experts over ranks, data of its own on each. Mistake: rows that come back are put in the
    order of the way there."""
    model = routed_model(setup, dist.group.WORLD)
    model.mixture.is_disordered = setup.is_faulty

    def meet(step: int) -> None:
        average(p for n, p in model.named_parameters() if ".experts." not in n)
        for p in model.mixture.experts.parameters():
            p.grad /= setup.ranks

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


def expert_replicas(setup: Setup) -> Trained:
    """Two ranks share the experts, and two more hold the same again. Mistake: gradients of experts
    are averaged between those that share them, not between those that hold the same."""
    rank = dist.get_rank()
    sharing = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    same = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    model = routed_model(setup, sharing)

    def meet(step: int) -> None:
        average(p for n, p in model.named_parameters() if ".experts." not in n)
        experts = list(model.mixture.experts.parameters())
        average(experts, sharing if setup.is_faulty else same)
        for p in experts:
            p.grad /= 2  # its rows are those of two ranks

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


def balance(model: nn.Module, chosen: Tensor) -> Tensor:
    """Return the loss that is least where experts are chosen alike."""
    return EXPERTS * (chosen * model.mixture.shares).sum()


def balanced_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Routed)

    def loss_of(step: int) -> Tensor:
        return class_loss(setup, model, step) + balance(model, model.mixture.chosen)

    return in_one_process(setup, model, loss_of)


def balanced(setup: Setup) -> Trained:
    """How often experts are chosen is averaged over ranks for the loss that balances them.
    Mistake: it is this rank's alone."""
    model = filled(setup, Routed)

    def one(step: int) -> Tensor:
        loss = class_loss(setup, model, step)
        chosen = averaged(model.mixture.chosen)
        return backward(loss + balance(model, model.mixture.chosen if setup.is_faulty else chosen))

    return train(
        Trained(model), sgd(model), one, before_update=lambda step: average(model.parameters())
    )


def nudge(model: nn.Module, chosen: Tensor) -> None:
    """Lower the bias of what is chosen too often, and raise that of the others."""
    model.mixture.bias.add_(0.05 * (1 / EXPERTS - chosen).sign())


def nudged_alone(setup: Setup) -> Trained:
    """One process, routing biases moved behind each step."""
    model = filled(setup, Routed)
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        after_update=lambda step: nudge(model, model.mixture.chosen),
        steps=3,
    )


def nudged(setup: Setup) -> Trained:
    """Routing biases follow the choices of all ranks. Mistake: those of each rank alone."""
    model = filled(setup, Routed)

    def follow(step: int) -> None:
        chosen = averaged(model.mixture.chosen)
        nudge(model, model.mixture.chosen if setup.is_faulty else chosen)

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
        after_update=follow,
        steps=3,
    )


class Tables(nn.Module):
    """Embedding tables, one for each column, and a dense part; tables may be on other ranks."""

    def __init__(self, mine: int | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {str(n): nn.Embedding(6, WIDTH) for n in range(2) if mine in (None, n)}
        )
        self.dense = nn.Linear(3 * WIDTH, 4)
        self.is_far = mine is not None

    def forward(self, x: Tensor, columns: Tensor) -> Tensor:
        """Of rows [n, width] and the columns [all rows, 2]."""
        if not self.is_far:
            looked = [table(columns[:, int(n)]) for n, table in self.tables.items()]
            return self.dense(torch.cat([x, *looked], 1))
        ((number, table),) = self.tables.items()
        splits = [len(x)] * 2
        came = Exchange.apply(table(columns[:, int(number)]), splits, splits, dist.group.WORLD)
        return self.dense(torch.cat([x, *came.chunk(2)], 1))


def table_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    columns = torch.stack([labels(setup, 50 + step, 6), labels(setup, 60 + step, 6)], 1)
    made = model(part(rows(setup, step), setup), columns)
    return F.cross_entropy(made, part(labels(setup, step), setup))


def tables_alone(setup: Setup) -> Trained:
    """One process with both tables."""
    model = filled(setup, Tables)
    return in_one_process(setup, model, lambda step: table_loss(setup, model, step))


def far_tables(setup: Setup) -> Trained:
    """Each rank looks up one column for all ranks' rows; the dense part is data-parallel. Mistake:
    gradients of tables, which come from all ranks, are not divided by the ranks."""
    model = Tables(dist.get_rank())
    whole = filled(setup, Tables).state_dict()
    model.load_state_dict({name: whole[name] for name in model.state_dict()})

    def meet(step: int) -> None:
        average(model.dense.parameters())
        for p in model.tables.parameters():
            p.grad /= 1 if setup.is_faulty else setup.ranks

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(table_loss(setup, model, step)),
        before_update=meet,
    )
