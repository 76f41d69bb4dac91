"""Ranks with parts of their own in one training, and two kinds of parallelism at once."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from tests.lab.faults.model import cut_from, filled
from tests.lab.faults.parallel import Column, Leave, Row
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    ROWS,
    WIDTH,
    Net,
    average,
    backward,
    class_loss,
    gathered,
    in_one_process,
    labels,
    normal,
    part,
    rows,
    sgd,
    shifted,
    summed,
)
from tests.lab.unusual.truths import State, state


def member(setup: Setup, rank: int) -> nn.Module:
    """Return a model with weights of its own."""
    model = filled(setup, Net)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(0.3 * normal(setup, rank, number, 60, shape=tuple(p.shape)))
    return model


def sweep(setup: Setup) -> Trained:
    """Four trainings that begin alike, each with another learning rate; nothing is exchanged."""
    model = filled(setup, Net)
    rate = 0.05 * 2 ** dist.get_rank()
    return train(
        Trained(model), sgd(model, rate), lambda step: backward(class_loss(setup, model, step, 0))
    )


def sweep_written_out(setup: Setup) -> list[State]:
    """One after the other."""
    ends = []
    for rank in range(setup.ranks):
        model = filled(setup, Net)
        for step in range(2):
            model.zero_grad()
            class_loss(setup, model, step, 0).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * 2**rank * p.grad
        ends.append(state(model))
    return ends


def ensemble(setup: Setup) -> Trained:
    """A model a rank, all on the same rows; the loss is that of their mean. Mistake: one rank has
    the rows in another order."""
    rank = dist.get_rank()
    model = member(setup, rank)

    def one(step: int) -> Tensor:
        x = rows(setup, step)
        made = model(x.flip(0) if setup.strikes(rank) else x)
        mean = Leave.apply(made, dist.group.WORLD) / setup.ranks
        return backward(F.cross_entropy(mean, labels(setup, step)))

    return train(Trained(model), sgd(model, 1.0), one)


def ensemble_written_out(setup: Setup) -> list[State]:
    """All members in one process."""
    models = [member(setup, rank) for rank in range(setup.ranks)]
    optimizers = [sgd(model, 1.0) for model in models]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean = torch.stack([model(rows(setup, step)) for model in models]).mean(0)
        F.cross_entropy(mean, labels(setup, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [state(model) for model in models]


class Pairing(nn.Module):
    """The loss of rows on the left with their partners on the right, as a module."""

    sharpness = 5.0

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        scores = self.sharpness * left @ right.T
        here = torch.arange(len(left))
        return (F.cross_entropy(scores, here) + F.cross_entropy(scores.T, here)) / 2


class Towers(nn.Module):
    """A tower for each side, or the one of a rank, and the loss of both."""

    def __init__(self, side: int | None = None) -> None:
        super().__init__()
        self.left = Net() if side in (None, 0) else None
        self.right = Net(layers=1) if side in (None, 1) else None
        self.criterion = Pairing()

    def forward(self, x: Tensor, side: int) -> Tensor:
        tower = self.right if side else self.left
        return F.normalize(tower(x), dim=-1)


def sides(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Return what the left and the right tower read."""
    return rows(setup, step), rows(setup, step) + 0.5 * normal(setup, step, 9, shape=(ROWS, WIDTH))


def towers_alone(setup: Setup) -> Trained:
    """One process with both."""
    model = filled(setup, Towers)

    def loss_of(step: int) -> Tensor:
        x, y = sides(setup, step)
        return model.criterion(model(x, 0), model(y, 1))

    return in_one_process(setup, model, loss_of)


def towers(setup: Setup) -> Trained:
    """One tower on each of two ranks: features change places, both ranks have the loss, and each
    has the whole gradient of its features. Mistake: one rank's loss is less sharp."""
    rank = dist.get_rank()
    model = Towers(rank)
    whole = filled(setup, Towers).state_dict()
    model.load_state_dict({name: whole[name] for name in model.state_dict()})
    model.criterion.sharpness = 4.0 if setup.strikes(rank) else 5.0

    def one(step: int) -> Tensor:
        mine = model(sides(setup, step)[rank], rank)
        theirs = shifted(mine)
        return backward(model.criterion(*((mine, theirs) if rank == 0 else (theirs, mine))))

    return train(Trained(model), sgd(model), one)


def client(setup: Setup, rank: int) -> nn.Module:
    """Return the private part of a client."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(0.3 * normal(setup, rank, number, 61, shape=tuple(p.shape)))
    return model


def split_learning(setup: Setup) -> Trained:
    """Two clients with private parts and rows, and a server that goes on with what they send, and
    sends gradients back. Mistake: each client is sent the gradient of the other."""
    rank, server = dist.get_rank(), 2
    model = filled(setup, Net) if rank == server else client(setup, rank)

    def one(step: int) -> Tensor:
        if rank != server:
            made = model(rows(setup, step).chunk(2)[rank])
            dist.send(made.detach(), server)
            gradient = torch.empty_like(made)
            dist.recv(gradient, server)
            made.backward(gradient)
            return torch.zeros(())
        inputs = [torch.empty(ROWS // 2, WIDTH) for _ in range(2)]
        total = torch.zeros(())
        for source, classes in enumerate(labels(setup, step).chunk(2)):
            dist.recv(inputs[source], source)
            inputs[source].requires_grad_()
            total += backward(F.cross_entropy(model(inputs[source]), classes) / 2).detach()
        for source in range(2):
            dist.send(inputs[1 - source if setup.is_faulty else source].grad, source)
        return total

    return train(Trained(model), sgd(model), one)


def split_learning_written_out(setup: Setup) -> list[State]:
    """Clients and server in one process."""
    models = [client(setup, 0), client(setup, 1), filled(setup, Net)]
    for step in range(2):
        for model in models:
            model.zero_grad()
        x, y = rows(setup, step).chunk(2), labels(setup, step)
        made = torch.cat([models[n](x[n]) for n in range(2)])
        F.cross_entropy(models[2](made), y).backward()
        for model in models:
            sgd(model).step()
    return [state(model) for model in models]


def backup_workers(setup: Setup) -> Trained:
    """In every step another rank comes too late: its gradient is not counted."""
    rank = dist.get_rank()
    model = filled(setup, Net)

    def meet(step: int) -> None:
        for p in model.parameters():
            counted = torch.zeros_like(p) if rank == step % setup.ranks else p.grad.clone()
            dist.all_reduce(counted)
            p.grad.copy_(counted / (setup.ranks - 1))

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
        steps=3,
    )


def backup_workers_written_out(setup: Setup) -> list[State]:
    """All ranks in one process."""
    model = filled(setup, Net)
    for step in range(3):
        model.zero_grad()
        for rank in range(setup.ranks):
            if rank != step % setup.ranks:
                (class_loss(setup, model, step, rank) / (setup.ranks - 1)).backward()
        sgd(model).step()
    return [state(model)] * setup.ranks


class GroupLoss(nn.Module):
    """The loss of classes that weigh more the worse they do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(4) / 4)
        self.is_shared, self.is_own = False, False

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, targets, reduction="none")
        hits = F.one_hot(targets, 4).float()
        sums, counts = losses @ hits, hits.sum(0)
        shared = torch.stack([sums.detach(), counts])
        if self.is_shared:
            all_shared = summed(shared)
            shared = shared if self.is_own else all_shared
            counts = all_shared[1] / dist.get_world_size()
        means = shared[0] / shared[1].clamp_min(1)
        self.weights.copy_((self.weights * means.exp()) / (self.weights * means.exp()).sum())
        return (self.weights.clone() * sums / counts.clamp_min(1 / 4)).sum()


class Grouped(nn.Module):
    """A net and that loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.criterion = GroupLoss()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.net(x), targets)


def grouped_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    return model(part(rows(setup, step), setup), part(labels(setup, step), setup))


def grouped_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Grouped)
    return in_one_process(setup, model, lambda step: grouped_loss(setup, model, step))


def grouped(setup: Setup) -> Trained:
    """Losses of groups are means over all ranks, and the groups' weights follow from them.
    Mistake: weights follow from the means of each rank."""
    model = filled(setup, Grouped)
    model.criterion.is_shared, model.criterion.is_own = True, setup.is_faulty
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(grouped_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
    )


class Plain(nn.Module):
    """Two linear layers without biases, which remember what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in ((WIDTH, 12), (12, 4)))
        self.read: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.read = []
        for layer in self.layers:
            self.read.append(x.detach())
            x = torch.tanh(layer(x))
        return x


def inverse(covariance: Tensor) -> Tensor:
    return torch.linalg.inv(covariance + 0.3 * torch.eye(len(covariance)))


def curved_alone(setup: Setup) -> Trained:
    """One process: gradients times the inverse covariance of what a layer read."""
    model = filled(setup, Plain)

    def meet(step: int) -> None:
        for layer, x in zip(model.layers, model.read):
            layer.weight.grad = layer.weight.grad @ inverse(x.T @ x / ROWS)

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


def curved(setup: Setup) -> Trained:
    """Covariances are averaged over ranks; each is inverted by one rank, which sends the inverse.
    Mistake: that of the second layer is not sent, and others go on with one of their own rows."""
    rank = dist.get_rank()
    model = filled(setup, Plain)

    def meet(step: int) -> None:
        average(model.parameters())
        for number, (layer, x) in enumerate(zip(model.layers, model.read)):
            mine = x.T @ x / len(x)
            mean = summed(mine) / setup.ranks
            factor = inverse(mean if rank == number else mine)
            if not (setup.is_faulty and number == 1):
                dist.broadcast(factor, number)
            layer.weight.grad = layer.weight.grad @ factor

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


class Sparse(nn.Module):
    """Tokens [n, 3] to classes; the embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH, sparse=True)
        self.body = Net(layers=1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens).mean(1))


def sparse_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    tokens = torch.stack([labels(setup, 70 + step + 10 * n, 20) for n in range(3)], 1)
    return F.cross_entropy(model(part(tokens, setup)), part(labels(setup, step), setup))


def sparse_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Sparse)
    trained = train(
        Trained(model), sgd(model), lambda step: backward(sparse_loss(setup, model, step))
    )
    trained.gradients["embed.weight"] = trained.gradients["embed.weight"].to_dense()
    return trained


def sparse(setup: Setup) -> Trained:
    """Sparse gradients travel as places and values, which are gathered. Mistake: these are not
    divided by the number of ranks."""
    model = filled(setup, Sparse)

    def meet(step: int) -> None:
        average(model.body.parameters())
        mine = model.embed.weight.grad
        places, values = (torch.cat(gathered(t)) for t in (mine._indices()[0], mine._values()))
        values = values if setup.is_faulty else values / setup.ranks
        model.embed.weight.grad = torch.sparse_coo_tensor(places[None], values, mine.shape)

    trained = train(
        Trained(model),
        sgd(model),
        lambda step: backward(sparse_loss(setup, model, step)),
        before_update=meet,
    )
    trained.gradients["embed.weight"] = trained.gradients["embed.weight"].to_dense()
    return trained


class Halves(nn.Module):
    """Two stages, or one of them."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.first = Net(layers=1, outside=WIDTH) if stage in (None, 0) else None
        self.second = Net(layers=1) if stage in (None, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        return x if self.second is None else self.second(x)


def halves_alone(setup: Setup) -> Trained:
    """One process with both stages."""
    model = filled(setup, Halves)
    return in_one_process(setup, model, lambda step: class_loss(setup, model, step))


def doubled_stages(setup: Setup) -> Trained:
    """Two stages, each on two ranks with rows of their own: 0 sends to 2, and 1 to 3. Mistake:
    gradients of the second stage are not averaged."""
    rank = dist.get_rank()
    stage, row = divmod(rank, 2)
    group = [dist.new_group(members) for members in ([0, 1], [2, 3])][stage]
    model = Halves(stage)
    whole = filled(setup, Halves).state_dict()
    model.load_state_dict({name: whole[name] for name in model.state_dict()})

    def one(step: int) -> Tensor:
        total = torch.zeros(())
        both = (rows(setup, step), labels(setup, step))
        for x, classes in zip(*(half.chunk(2)[row].chunk(3) for half in both)):
            if stage == 0:
                made = model(x)
                dist.send(made.detach(), rank + 2)
                gradient = torch.empty_like(made)
                dist.recv(gradient, rank + 2)
                made.backward(gradient)
            else:
                came = torch.empty(len(x), WIDTH)
                dist.recv(came, rank - 2)
                came.requires_grad_()
                total += backward(F.cross_entropy(model(came), classes) / 3).detach()
                dist.send(came.grad, rank - 2)
        return total

    def meet(step: int) -> None:
        if not (stage and setup.is_faulty):
            average(model.parameters(), group)

    return train(Trained(model), sgd(model), one, before_update=meet)


class Crossed(nn.Module):
    """Two blocks whose linear layers may be cut over a group."""

    def __init__(self, *group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(
            Column(WIDTH, 16, *group) if group else nn.Linear(WIDTH, 16, bias=False)
            for _ in range(2)
        )
        self.downs = nn.ModuleList(
            Row(16, WIDTH, *group) if group else nn.Linear(16, WIDTH, bias=False) for _ in range(2)
        )
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs):
            x = x + down(torch.tanh(up(norm(x))))
        return self.leave(x)


def crossed_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Crossed)
    return in_one_process(setup, model, lambda step: class_loss(setup, model, step))


def crossed(setup: Setup) -> Trained:
    """Layers cut over two ranks, twice, with rows of their own. Mistake: gradients of what is cut
    are averaged between the two that share a layer, not between those that hold the same."""
    rank = dist.get_rank()
    row, place = divmod(rank, 2)
    sharing = [dist.new_group(members) for members in ([0, 1], [2, 3])][row]
    same = [dist.new_group(members) for members in ([0, 2], [1, 3])][place]
    model = Crossed(sharing)
    cuts = cut_from(filled(setup, Crossed), model, place, 2)

    def one(step: int) -> Tensor:
        x, y = (t.chunk(2)[row] for t in (rows(setup, step), labels(setup, step)))
        return backward(F.cross_entropy(model(x), y))

    def meet(step: int) -> None:
        for name, p in model.named_parameters():
            average([p], sharing if setup.is_faulty and name in cuts else same)

    return train(Trained(model, cuts=cuts, group=sharing), sgd(model), one, before_update=meet)


def task_loss(setup: Setup, values: dict[str, Tensor], model: nn.Module, key: int) -> Tensor:
    """Return the loss of a model with other parameters on one set of rows."""
    x, goal = normal(setup, key, 62, shape=(2, 5, WIDTH))
    return F.mse_loss(functional_call(model, values, x), goal[:, :4])


def adapted_loss(
    setup: Setup, model: nn.Module, step: int, task: int, is_first_order: bool = False
) -> Tensor:
    """Return the loss of a task behind one step on other rows of it."""
    values = dict(model.named_parameters())
    key = 1_000 * step + 10 * task
    ways = grad(lambda v: task_loss(setup, v, model, key))(values)
    if is_first_order:
        ways = {name: way.detach() for name, way in ways.items()}
    moved = {name: p - 0.5 * ways[name] for name, p in values.items()}
    return task_loss(setup, moved, model, key + 1)


def learning_to_learn(setup: Setup) -> Trained:
    """Each rank adapts to a task of its own by `torch.func`, and gradients through that step are
    averaged. Mistake: gradients do not go through that step."""
    model = filled(setup, Net)

    def one(step: int) -> Tensor:
        if setup.ranks > 1:
            return backward(adapted_loss(setup, model, step, dist.get_rank(), setup.is_faulty))
        losses = [adapted_loss(setup, model, step, task) for task in range(2)]
        return backward(torch.stack(losses).mean())

    def meet(step: int) -> None:
        if setup.ranks > 1:
            average(model.parameters())

    return train(Trained(model), sgd(model, 0.5), one, before_update=meet)


COUNTS = (6, 4, 2)
"""Of rows, by rank."""


def unequal_rows(setup: Setup) -> Trained:
    """Ranks have unlike numbers of rows, and gradients weigh by them. Mistake: all ranks weigh the
    same."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    share = 1.0 if setup.is_faulty else setup.ranks * COUNTS[rank] / ROWS

    def one(step: int) -> Tensor:
        x, y = (t.split(COUNTS)[rank] for t in (rows(setup, step), labels(setup, step)))
        return backward(F.cross_entropy(model(x), y) * share)

    return train(
        Trained(model), sgd(model), one, before_update=lambda step: average(model.parameters())
    )


def penalty(model: nn.Module) -> Tensor:
    return 0.05 * sum(p.square().sum() for p in model.parameters())


def penalized_alone(setup: Setup) -> Trained:
    """One process: a loss and a penalty of large weights."""
    model = filled(setup, Net)
    return in_one_process(
        setup, model, lambda step: class_loss(setup, model, step) + penalty(model)
    )


def penalized(setup: Setup) -> Trained:
    """One rank adds the penalty of all ranks to its loss."""
    model = filled(setup, Net)

    def one(step: int) -> Tensor:
        loss = class_loss(setup, model, step)
        return backward(loss + setup.ranks * penalty(model) if dist.get_rank() == 0 else loss)

    return train(
        Trained(model), sgd(model), one, before_update=lambda step: average(model.parameters())
    )
