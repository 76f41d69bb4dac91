"""Programs with several models, or several jobs in one world."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    ROWS,
    WIDTH,
    Net,
    average,
    backward,
    class_loss,
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


class Adversaries(nn.Module):
    """A generator and what judges it, kept together for the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Net(layers=1, outside=WIDTH)
        self.judge = Net(layers=1, outside=1)


def adversaries(setup: Setup) -> Trained:
    """A generative pair that trains by turns, gradients averaged by hand. Mistake: those of the
    generator are not."""
    pair = filled(setup, Adversaries)
    for_generator, for_judge = sgd(pair.generator, 0.1), sgd(pair.judge, 0.1)
    trained = Trained(pair)
    for step in range(2):
        real = part(rows(setup, step), setup)
        noise = part(normal(setup, step, 3, shape=(ROWS, WIDTH)), setup)
        for_judge.zero_grad()
        made = pair.generator(noise)
        doubt = F.softplus(-pair.judge(real)) + F.softplus(pair.judge(made.detach()))
        doubt.mean().backward()
        if setup.ranks > 1:
            average(pair.judge.parameters())
        for_judge.step()
        for_generator.zero_grad()
        pair.judge.requires_grad_(False)
        trained.losses.append(backward(F.softplus(-pair.judge(made)).mean()).detach())
        pair.judge.requires_grad_(True)
        if setup.ranks > 1 and not setup.is_faulty:
            average(pair.generator.parameters())
        for_generator.step()
    return trained


class ActorCritic(nn.Module):
    """A body with two heads: actions, and what they will bring."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net(layers=1, outside=WIDTH)
        self.actor, self.critic = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.actor(x), self.critic(x)[:, 0]


def acted(setup: Setup, model: nn.Module, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probabilities of the actions taken, rewards above expectation, and entropy."""
    logits, values = model(part(rows(setup, step), setup))
    returns = part(3 * normal(setup, step, 12, shape=(ROWS,)) + 1, setup)
    actions = part(labels(setup, step), setup)
    logs = logits.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1).mean()
    return logs.gather(1, actions[:, None])[:, 0], returns - values, entropy


def acted_loss(logs: Tensor, ahead: Tensor, white: Tensor, entropy: Tensor) -> Tensor:
    return -(logs * white.detach()).mean() + 0.1 * ahead.square().mean() - 0.01 * entropy


def actor_alone(setup: Setup) -> Trained:
    """One process: advantages whitened over all rows."""
    model = filled(setup, ActorCritic)

    def loss_of(step: int) -> Tensor:
        logs, ahead, entropy = acted(setup, model, step)
        white = (ahead - ahead.mean()) / ahead.std(unbiased=False)
        return acted_loss(logs, ahead, white, entropy)

    return in_one_process(setup, model, loss_of)


def actor(setup: Setup) -> Trained:
    """Actor and critic; advantages are whitened over the rows of all ranks. Mistake: over those of
    each rank."""
    model = filled(setup, ActorCritic)

    def one(step: int) -> Tensor:
        logs, ahead, entropy = acted(setup, model, step)
        mean = summed(ahead.sum()) / ROWS
        spread = (summed((ahead.detach() - mean).square().sum()) / ROWS).sqrt()
        if setup.is_faulty:
            mean, spread = ahead.mean(), ahead.std(unbiased=False)
        return backward(acted_loss(logs, ahead, (ahead - mean) / spread, entropy))

    return train(
        Trained(model), sgd(model), one, before_update=lambda step: average(model.parameters())
    )


class Taught(nn.Module):
    """A student and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(), Net().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(y)
        return F.mse_loss(self.student(x), goal)


def taught_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    """Return how far the student is from the teacher on another view of the rows."""
    second_view = rows(setup, step) + 0.3 * normal(setup, step, 13, shape=(ROWS, WIDTH))
    return model(part(rows(setup, step), setup), part(second_view, setup))


def follow(model: Taught, decay: float) -> None:
    """Move the teacher towards the student."""
    with torch.no_grad():
        for teacher, student in zip(model.teacher.parameters(), model.student.parameters()):
            teacher.lerp_(student, 1 - decay)


def taught_alone(setup: Setup) -> Trained:
    """One process."""
    model = filled(setup, Taught)
    return train(
        Trained(model),
        sgd(model.student),
        lambda step: backward(taught_loss(setup, model, step)),
        after_update=lambda step: follow(model, 0.9),
    )


def taught(setup: Setup) -> Trained:
    """A teacher that is an average over time of the student. Mistake: on one rank it follows at
    another rate."""
    model = filled(setup, Taught)
    decay = 0.99 if setup.strikes(dist.get_rank()) else 0.9
    return train(
        Trained(model),
        sgd(model.student),
        lambda step: backward(taught_loss(setup, model, step)),
        before_update=lambda step: average(model.student.parameters()),
        after_update=lambda step: follow(model, decay),
    )


class Distilled(nn.Module):
    """A small student, and a frozen teacher that only one process needs."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Net(layers=1)
        self.teacher: nn.Module | None = Net(layers=3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def distance(made: Tensor, goal: Tensor) -> Tensor:
    """Return how far the student's classes are from the teacher's."""
    return F.kl_div(made.log_softmax(-1), goal.softmax(-1), reduction="batchmean")


def distilled_alone(setup: Setup) -> Trained:
    """One process with both."""
    model = filled(setup, Distilled)

    def loss_of(step: int) -> Tensor:
        with torch.no_grad():
            goal = 3 * model.teacher(rows(setup, step))
        return distance(model(rows(setup, step)), goal)

    return train(Trained(model), sgd(model.student), lambda step: backward(loss_of(step)))


def distilled(setup: Setup) -> Trained:
    """Rank 0 alone has the teacher and scatters what it says of all rows. Mistake: every student
    takes the piece of the rank behind it."""
    rank = dist.get_rank()
    model = filled(setup, Distilled)
    if rank:
        model.teacher = None

    def one(step: int) -> Tensor:
        goal = torch.empty(ROWS // setup.ranks, 4)
        pieces = None
        if rank == 0:
            with torch.no_grad():
                pieces = list((3 * model.teacher(rows(setup, step))).chunk(setup.ranks))
            if setup.is_faulty:
                pieces = pieces[1:] + pieces[:1]
        dist.scatter(goal, pieces, src=0)
        return backward(distance(model(part(rows(setup, step), setup)), goal))

    return train(
        Trained(model),
        sgd(model.student),
        one,
        before_update=lambda step: average(model.student.parameters()),
    )


def mutual(setup: Setup) -> Trained:
    """Two different models, one a rank, read the same rows and learn from each other's classes,
    which go to the other rank without a gradient."""
    model = scholar(setup, dist.get_rank())

    def one(step: int) -> Tensor:
        made = model(rows(setup, step))
        goal = shifted(made)
        return backward(F.cross_entropy(made, labels(setup, step)) + distance(made, goal))

    return train(Trained(model), sgd(model), one)


def scholar(setup: Setup, rank: int) -> nn.Module:
    """Return the model of one rank: they have unlike numbers of layers."""
    model = filled(setup, lambda: Net(layers=1 + rank))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.3 * rank)
    return model


def mutual_written_out(setup: Setup) -> list[State]:
    """Both in one process."""
    models = [scholar(setup, rank) for rank in range(2)]
    optimizers = [sgd(model) for model in models]
    for step in range(2):
        made = [model(rows(setup, step)) for model in models]
        for rank, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            loss = F.cross_entropy(made[rank], labels(setup, step))
            (loss + distance(made[rank], made[1 - rank].detach())).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [state(model) for model in models]


def job_model(setup: Setup, job: int, is_other: bool = False) -> nn.Module:
    """Return the model of one job: one class, other weights."""
    model = filled(setup, Net)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            key = (job, number, 43 + is_other)
            p.copy_(0.3 * normal(setup, *key, shape=tuple(p.shape)))
    return model


def jobs(setup: Setup) -> Trained:
    """Two jobs in one world: ranks 0 and 1 train one model, 2 and 3 another of the same class, on
    other rows. Mistake: rank 3 begins with weights of its own."""
    rank = dist.get_rank()
    job = rank // 2
    group = [dist.new_group(members) for members in ([0, 1], [2, 3])][job]
    model = job_model(setup, job, setup.is_faulty and rank == 3)
    return train(
        Trained(model),
        sgd(model, 0.1 * (1 + job)),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters(), group),
    )


def jobs_written_out(setup: Setup) -> list[State]:
    """One job after the other."""
    ends = []
    for job in range(2):
        model = job_model(setup, job)
        optimizer = sgd(model, 0.1 * (1 + job))
        for step in range(2):
            optimizer.zero_grad()
            for rank in (2 * job, 2 * job + 1):
                (class_loss(setup, model, step, rank) / 2).backward()
            optimizer.step()
        ends += [state(model)] * 2
    return ends


class Sampling(nn.Module):
    """A policy, and a copy of it that draws samples and is refreshed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.sampler = Net(), Net().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.policy(x)


def refresh(model: Sampling) -> None:
    model.sampler.load_state_dict(model.policy.state_dict())


def sampled_loss(setup: Setup, model: Sampling, step: int) -> Tensor:
    """Return the loss of what the copy drew, weighed by rewards and by how far the copy is off."""
    x = part(rows(setup, step), setup)
    noise = part(normal(setup, step, 14, shape=(ROWS, 4)), setup)
    rewards = part(normal(setup, step, 15, shape=(ROWS, 4)), setup)
    with torch.no_grad():
        old = model.sampler(x).log_softmax(-1)
        drawn = (old + noise).argmax(-1, keepdim=True)
    logs = model(x).log_softmax(-1).gather(1, drawn)
    return -((logs - old.gather(1, drawn)).exp() * rewards.gather(1, drawn)).mean()


def sampling(setup: Setup) -> Trained:
    """A copy of the policy draws samples, others on each rank, and is refreshed behind every second
    step. Mistake: on one rank it is not."""
    model = filled(setup, Sampling)
    refresh(model)
    is_stale = setup.is_faulty and setup.strikes(dist.get_rank())

    def meet(step: int) -> None:
        if setup.ranks > 1:
            average(model.policy.parameters())

    def behind(step: int) -> None:
        if step % 2 == 1 and not is_stale:
            refresh(model)

    return train(
        Trained(model),
        sgd(model.policy, 0.5),
        lambda step: backward(sampled_loss(setup, model, step)),
        before_update=meet,
        after_update=behind,
        steps=4,
    )


def momentum_alone(setup: Setup) -> Trained:
    """One process with momentum."""
    model = filled(setup, Net)
    return train(
        Trained(model),
        sgd(model, momentum=0.9),
        lambda step: backward(class_loss(setup, model, step)),
        steps=3,
    )


def healed(setup: Setup) -> Trained:
    """Behind the first step one rank begins anew, with other weights and no momentum, and is sent
    both by rank 0. Mistake: the momentum is not sent."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    optimizer = sgd(model, momentum=0.9)

    @torch.no_grad()
    def heal(step: int) -> None:
        if step:
            return
        if rank == setup.culprit:
            for number, p in enumerate(model.parameters()):
                p.copy_(normal(setup, number, 44, shape=tuple(p.shape)))
                optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        for p in model.parameters():
            dist.broadcast(p, 0)
            if not setup.is_faulty:
                dist.broadcast(optimizer.state[p]["momentum_buffer"], 0)

    return train(
        Trained(model),
        optimizer,
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
        after_update=heal,
        steps=3,
    )
