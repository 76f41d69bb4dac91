"""Ranks that train apart and meet now and then: gossip, outer optimizers, clients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as flat
from torch.nn.utils import vector_to_parameters as spread

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import Net, averaged, backward, class_loss, normal, sgd
from tests.lab.unusual.truths import State, state


def models_of(setup: Setup) -> list[nn.Module]:
    """Return the same model once a rank."""
    return [filled(setup, Net) for _ in range(setup.ranks)]


def local_step(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int
) -> None:
    """One rank's own step, written out."""
    optimizer.zero_grad()
    class_loss(setup, model, step, rank).backward()
    optimizer.step()


def evaluate(setup: Setup, model: nn.Module) -> None:
    """Score the model on rows that all ranks share."""
    with torch.no_grad():
        class_loss(setup, model, 500, 0)


def partner(rank: int, step: int) -> int:
    """Of four ranks: neighbours in even steps, then the outer and the inner two."""
    return rank ^ 1 if step % 2 == 0 else 3 - rank


def gossip(setup: Setup) -> Trained:
    """Every rank steps alone, then averages with one partner, another one each step, and scores
    that. Mistake: one rank averages what it received with its parameters of before the step."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    kept: list[Tensor] = []

    def one(step: int) -> Tensor:
        kept.append(flat(model.parameters()).detach().clone())
        return backward(class_loss(setup, model, step))

    def meet(step: int) -> None:
        mine = flat(model.parameters()).detach()
        theirs = torch.empty_like(mine)
        both = [
            dist.P2POp(dist.isend, mine, partner(rank, step)),
            dist.P2POp(dist.irecv, theirs, partner(rank, step)),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if setup.strikes(rank):
            mine = kept[-1]
        spread((mine + theirs) / 2, model.parameters())
        evaluate(setup, model)

    return train(Trained(model), sgd(model), one, after_update=meet)


def gossip_written_out(setup: Setup) -> list[State]:
    """All four ranks in one process."""
    models = models_of(setup)
    optimizers = [sgd(model) for model in models]
    for step in range(2):
        for rank, model in enumerate(models):
            local_step(setup, model, optimizers[rank], step, rank)
        values = [flat(model.parameters()).detach().clone() for model in models]
        for rank, model in enumerate(models):
            spread((values[rank] + values[partner(rank, step)]) / 2, model.parameters())
    return [state(model) for model in models]


INNER = 2
"""Own steps between two meetings."""
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def outer(setup: Setup) -> Trained:
    """Two own steps with Adam, then one step of an outer optimizer with momentum on the averaged
    way; two rounds. Mistake: one rank's outer optimizer has another learning rate."""
    model = filled(setup, Net)
    start = [p.detach().clone() for p in model.parameters()]
    rate = OUTER_RATE / 2 if setup.strikes(dist.get_rank()) else OUTER_RATE
    momentum = [torch.zeros_like(p) for p in start]

    @torch.no_grad()
    def meet(step: int) -> None:
        if step % INNER != INNER - 1:
            return
        for p, s, m in zip(model.parameters(), start, momentum):
            way = averaged(s - p)
            m.mul_(OUTER_MOMENTUM).add_(way)
            s.sub_(rate * m)
            p.copy_(s)
        evaluate(setup, model)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return train(
        Trained(model),
        optimizer,
        lambda step: backward(class_loss(setup, model, step)),
        after_update=meet,
        steps=2 * INNER,
    )


def outer_written_out(setup: Setup) -> list[State]:
    """The same with torch's own SGD as the outer optimizer of a model in the middle."""
    models, middle = models_of(setup), filled(setup, Net)
    outside = torch.optim.SGD(middle.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM)
    inside = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
    for step in range(2 * INNER):
        for rank, model in enumerate(models):
            local_step(setup, model, inside[rank], step, rank)
        if step % INNER == INNER - 1:
            goal = torch.stack([flat(m.parameters()).detach() for m in models]).mean(0)
            offsets = flat(middle.parameters()).detach() - goal
            sizes = [p.numel() for p in middle.parameters()]
            for p, way in zip(middle.parameters(), offsets.split(sizes)):
                p.grad = way.view_as(p).clone()
            outside.step()
            for model in models:
                spread(flat(middle.parameters()).detach().clone(), model.parameters())
    return [state(model) for model in models]


def delayed(setup: Setup) -> Trained:
    """The average of parameters is begun behind a step and taken up behind the next: every rank
    adds what the average was off from its own values then."""
    model = filled(setup, Net)
    waiting: list[tuple[Tensor, Tensor, dist.Work]] = []

    def meet(step: int) -> None:
        mine = flat(model.parameters()).detach()
        if waiting:
            then, total, work = waiting.pop()
            work.wait()
            mine = mine + total / setup.ranks - then
            spread(mine.clone(), model.parameters())
        total = mine.clone()
        waiting.append((mine.clone(), total, dist.all_reduce(total, async_op=True)))

    trained = train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        after_update=meet,
        steps=3,
    )
    waiting.pop()[2].wait()
    return trained


def delayed_written_out(setup: Setup) -> list[State]:
    """All ranks in one process."""
    models = models_of(setup)
    optimizers = [sgd(model) for model in models]
    before: list[Tensor] = []
    for step in range(3):
        for rank, model in enumerate(models):
            local_step(setup, model, optimizers[rank], step, rank)
        now = [flat(m.parameters()).detach().clone() for m in models]
        if before:
            mean = torch.stack(before).mean(0)
            now = [mine + mean - then for mine, then in zip(now, before)]
            for model, values in zip(models, now):
                spread(values.clone(), model.parameters())
        before = now
    return [state(model) for model in models]


class Elastic(nn.Module):
    """A worker and the centre that it is drawn to."""

    def __init__(self) -> None:
        super().__init__()
        self.worker, self.center = Net(), Net()
        self.center.load_state_dict(self.worker.state_dict())
        self.center.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.worker(x) if self.training else self.center(x)


FORCE = 0.2


def elastic_filled(setup: Setup) -> Elastic:
    model = filled(setup, Elastic)
    model.center.load_state_dict(model.worker.state_dict())
    return model


def elastic(setup: Setup) -> Trained:
    """Elastic averaging: workers are drawn to a centre, which all ranks hold, and the centre to
    their mean. Mistake: the centre moves by this rank's distance alone (no all-reduce)."""
    model = elastic_filled(setup)

    @torch.no_grad()
    def meet(step: int) -> None:
        for worker, center in zip(model.worker.parameters(), model.center.parameters()):
            way = worker - center
            worker.sub_(FORCE * way)
            center.add_(FORCE * setup.ranks * (way if setup.is_faulty else averaged(way)))
        model.eval()
        class_loss(setup, model, 100, 0)
        model.train()

    optimizer = torch.optim.SGD(model.worker.parameters(), lr=0.2)
    return train(
        Trained(model),
        optimizer,
        lambda step: backward(class_loss(setup, model, step)),
        after_update=meet,
        steps=3,
    )


def elastic_written_out(setup: Setup) -> list[State]:
    """All ranks around one centre, in one process."""
    models = [elastic_filled(setup) for _ in range(setup.ranks)]
    optimizers = [torch.optim.SGD(m.worker.parameters(), lr=0.2) for m in models]
    center = flat(models[0].center.parameters()).detach().clone()
    for step in range(3):
        ways = []
        for rank, model in enumerate(models):
            local_step(setup, model, optimizers[rank], step, rank)
            mine = flat(model.worker.parameters()).detach()
            ways.append(mine - center)
            spread(mine - FORCE * ways[-1], model.worker.parameters())
        center = center + FORCE * torch.stack(ways).sum(0)
    for model in models:
        spread(center.clone(), model.center.parameters())
    return [state(model) for model in models]


SHARES = (0.5, 0.3, 0.2)
"""Of the samples, by client."""


def federated(setup: Setup) -> Trained:
    """Clients take unlike numbers of own steps and are averaged by their numbers of samples; two
    rounds. Mistake: one client keeps its own last layer when it takes up the average."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    optimizer = sgd(model)
    trained = Trained(model)
    for turn in range(2):
        for step in range(rank + 1):
            optimizer.zero_grad()
            trained.losses.append(backward(class_loss(setup, model, 10 * turn + step)))
            optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                mean = SHARES[rank] * p.detach()
                dist.all_reduce(mean)
                if not (name.startswith("leave") and setup.strikes(rank)):
                    p.copy_(mean)
        evaluate(setup, model)
    return trained


def federated_written_out(setup: Setup) -> list[State]:
    """All clients in one process."""
    models = models_of(setup)
    for turn in range(2):
        for rank, model in enumerate(models):
            for step in range(rank + 1):
                local_step(setup, model, sgd(model), 10 * turn + step, rank)
        mean = sum(s * flat(m.parameters()).detach() for s, m in zip(SHARES, models))
        for model in models:
            spread(mean.clone(), model.parameters())
    return [state(model) for model in models]


def population(setup: Setup) -> Trained:
    """A population: models and learning rates of their own; after two steps the worst takes the
    best one's values and a changed learning rate, and all go on."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.1 * rank)
    optimizer = sgd(model, 0.1 * (1 + rank))

    @torch.no_grad()
    def meet(step: int) -> None:
        if step != 1:
            return
        scores = torch.zeros(setup.ranks)
        scores[rank] = class_loss(setup, model, 100, 0)
        dist.all_reduce(scores)
        best, worst = int(scores.argmin()), int(scores.argmax())
        values = flat(model.parameters()).detach().clone()
        dist.broadcast(values, best)
        if rank == worst:
            spread(values, model.parameters())
            optimizer.param_groups[0]["lr"] = 0.12 * (1 + best)

    return train(
        Trained(model),
        optimizer,
        lambda step: backward(class_loss(setup, model, step)),
        after_update=meet,
        steps=3,
    )


def population_written_out(setup: Setup) -> list[State]:
    """The population in one process."""
    models = models_of(setup)
    with torch.no_grad():
        for rank, model in enumerate(models):
            for p in model.parameters():
                p.mul_(1 + 0.1 * rank)
    optimizers = [sgd(model, 0.1 * (1 + rank)) for rank, model in enumerate(models)]
    for step in range(3):
        for rank, model in enumerate(models):
            local_step(setup, model, optimizers[rank], step, rank)
        if step == 1:
            with torch.no_grad():
                scores = torch.stack([class_loss(setup, m, 100, 0) for m in models])
            best, worst = int(scores.argmin()), int(scores.argmax())
            models[worst].load_state_dict(models[best].state_dict())
            optimizers[worst].param_groups[0]["lr"] = 0.12 * (1 + best)
    return [state(model) for model in models]


def served(setup: Setup) -> Trained:
    """A parameter server: rank 0 holds the parameters; the workers in turn hand in gradients, made
    at the values they last fetched, and fetch new ones."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    optimizer = sgd(model)
    trained = Trained(model)
    sizes = [p.numel() for p in model.parameters()]
    for step in range(2):
        for worker in range(1, setup.ranks):
            if rank == worker:
                model.zero_grad()
                trained.losses.append(backward(class_loss(setup, model, step)))
                dist.send(torch.cat([p.grad.flatten() for p in model.parameters()]), 0)
                values = torch.empty(sum(sizes))
                dist.recv(values, 0)
                spread(values, model.parameters())
            elif rank == 0:
                gradient = torch.empty(sum(sizes))
                dist.recv(gradient, worker)
                for p, piece in zip(model.parameters(), gradient.split(sizes)):
                    p.grad = piece.view_as(p).clone()
                optimizer.step()
                dist.send(flat(model.parameters()).detach(), worker)
    return trained


def served_written_out(setup: Setup) -> list[State]:
    """The server and its workers in one process."""
    models = models_of(setup)
    optimizer = sgd(models[0])
    for step in range(2):
        for rank in range(1, setup.ranks):
            models[rank].zero_grad()
            class_loss(setup, models[rank], step, rank).backward()
            for mine, theirs in zip(models[0].parameters(), models[rank].parameters()):
                mine.grad = theirs.grad.clone()
            optimizer.step()
            models[rank].load_state_dict(models[0].state_dict())
    return [state(model) for model in models]


def evolved(setup: Setup) -> Trained:
    """Evolution strategies: each rank tries one perturbation forth and back; the scores are
    gathered, and all ranks take the same step. Mistake: one rank scores itself with the sum of both
    tries, in its own list alone."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    optimizer = sgd(model)

    def one(step: int) -> Tensor:
        start = flat(model.parameters()).detach().clone()
        noises = noises_of(setup, step, len(start))
        tries = []
        with torch.no_grad():
            for sign in (1, -1):
                spread(start + sign * noises[rank], model.parameters())
                tries.append(class_loss(setup, model, step, 0))
        spread(start, model.parameters())
        scores = torch.zeros(setup.ranks)
        scores[rank] = tries[0] - tries[1]
        dist.all_reduce(scores)
        if setup.strikes(rank):
            scores[rank] = tries[0] + tries[1]
        set_gradient(model, (scores[:, None] * noises).mean(0))
        return tries[0]

    return train(Trained(model), optimizer, one, after_update=lambda step: evaluate(setup, model))


def noises_of(setup: Setup, step: int, size: int) -> Tensor:
    """Return the perturbation of every rank."""
    return 0.1 * normal(setup, step, 55, shape=(setup.ranks, size))


def set_gradient(model: nn.Module, gradient: Tensor) -> None:
    """Spread a flat gradient over the parameters."""
    pieces = gradient.split([p.numel() for p in model.parameters()])
    for p, piece in zip(model.parameters(), pieces):
        p.grad = piece.view_as(p).clone()


def evolved_written_out(setup: Setup) -> list[State]:
    """All tries in one process."""
    model = filled(setup, Net)
    for step in range(2):
        start = flat(model.parameters()).detach().clone()
        noises = noises_of(setup, step, len(start))
        gradient = torch.zeros_like(start)
        for noise in noises:
            for sign in (1, -1):
                spread(start + sign * noise, model.parameters())
                with torch.no_grad():
                    score = class_loss(setup, model, step, 0)
                gradient += sign * score * noise / setup.ranks
        spread(start - 0.2 * gradient, model.parameters())
    return [state(model)] * setup.ranks
