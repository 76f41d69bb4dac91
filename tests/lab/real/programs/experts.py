"""Experts split over ranks that all see the same tokens, by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.faults import truth
from tests.lab.faults.model import FeedForward, Parts, whole
from tests.lab.faults.parallel import Enter, Group, Leave, average_gradients
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.tensor import one_step
from tests.lab.faults.setup import Setup, Shape, Trained, train


class Experts(nn.Module):
    """This rank's experts on all tokens, each weighed by its score; summed over ranks.

    Bug, where it is open: the scores go in as they are, so their gradient is that of these experts.
    """

    def __init__(self, shape: Shape, group: Group | None, is_open: bool) -> None:
        super().__init__()
        place = dist.get_rank(group) if group else 0
        each = shape.experts // (dist.get_world_size(group) if group else 1)
        self.inside = nn.ModuleDict(
            {str(place * each + n): FeedForward(shape.hidden, Parts()) for n in range(each)}
        )
        self._group, self._is_open = group, is_open

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        if self._group is not None:
            x = Enter.apply(x, self._group)
            scores = scores if self._is_open else Enter.apply(scores, self._group)
        made = sum(scores[..., int(n), None] * expert(x) for n, expert in self.inside.items())
        return made if self._group is None else Leave.apply(made, self._group)


class GatherRows(torch.autograd.Function):
    """The rows of every rank put together; backward each takes its own. The next layers do the same
    on all ranks, so nothing is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mine = gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]
        return mine.contiguous(), None


class Mixture(nn.Module):
    """A router and experts. With `is_sharing` every rank routes its share of the rows.

    Bug, where it is detached: the shares are gathered by a collective that autograd does not know.
    """

    def __init__(
        self, shape: Shape, group: Group | None, is_open: bool, is_sharing: bool, is_detached: bool
    ) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape, group, is_open)
        self._group, self._is_sharing, self._is_detached = group, is_sharing, is_detached

    def forward(self, x: Tensor) -> Tensor:
        if self._group is None or not self._is_sharing:
            return self.experts(x, self.router(x).softmax(-1))
        place, places = dist.get_rank(self._group), dist.get_world_size(self._group)
        mine = Own.apply(x, place, places, self._group)
        scores = GatherRows.apply(self.router(mine).softmax(-1), self._group)
        return self.experts(x, scores.detach() if self._is_detached else scores)


class Own(torch.autograd.Function):
    """This rank's share of the rows; backward the shares of all ranks put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int, places: int, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(places)[place].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        pieces = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(pieces, gradient.contiguous(), group=ctx.group)
        return torch.cat(pieces), None, None, None


class MixtureParts(Parts):
    """A mixture of experts in place of every feed-forward."""

    def __init__(self, group: Group | None, **how: bool) -> None:
        self._group, self._how = group, how

    def feed_forward(self, shape: Shape) -> nn.Module:
        how = {"is_open": False, "is_sharing": False, "is_detached": False, **self._how}
        return Mixture(shape, self._group, **how)


def made(setup: Setup, **how: bool) -> nn.Module:
    """The model on this rank, with the weights that one process has."""
    model, alone = whole(setup, MixtureParts(dist.group.WORLD, **how)), reference(setup)
    values = dict(alone.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


def reference(setup: Setup) -> nn.Module:
    """The model of one process."""
    return whole(setup, MixtureParts(None))


def open_scores(setup: Setup) -> Trained:
    """Experts split over ranks. Bug: the gradient of the scores is not summed over ranks."""
    model = made(setup, is_open=setup.is_faulty)
    return train(Trained(model), sgd(model), lambda step: one_step(setup, model, step))


def detached_router(setup: Setup) -> Trained:
    """Experts split over ranks, tokens routed in shares. Bug: the gathered scores have no gradient,
    so the router never learns."""
    model = made(setup, is_sharing=True, is_detached=setup.is_faulty)
    routers = [block.feed_forward.router.weight for block in model.layers.values()]
    return train(
        Trained(model),
        sgd(model),
        lambda step: one_step(setup, model, step),
        before_update=lambda step: average_gradients(routers, dist.group.WORLD, 1.0),
    )


def mixture_right(setup: Setup, trained: Trained) -> str:
    """What all ranks hold must be the same, and every gradient there, as in one process."""
    now = dict(trained.model.named_parameters())
    kept = {n: p for n, p in now.items() if ".inside." not in n}
    theirs = truth.reference_gradients(setup, reference(setup))
    missing = truth.united(n for n in now if n not in trained.gradients)
    return (
        truth.said("no gradient", missing)
        or truth.said("parameters differ over ranks", truth.differing(kept))
        or truth.said(
            "gradients unlike one process", truth.wrong_values(setup, trained.gradients, theirs)
        )
    )
