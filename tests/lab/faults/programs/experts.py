"""Programs whose feed-forward is a mixture of experts, split over ranks or held by all."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults import truth
from tests.lab.faults.layouttext import layout_text
from tests.lab.faults.model import FeedForward, Parts, batch, cut_from, loss_of, whole
from tests.lab.faults.parallel import Cut, Exchange, Group, average_gradients
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.tensor import replicate, tensor_mesh
from tests.lab.faults.setup import Setup, Shape, Trained, train

ROUTER_LAYOUT = layout_text("tp={ranks}", [("layers.*.router", "*", {"tp": "Replicate()"})])


class Mixture(nn.Module):
    """Each token to the best of all experts, weighted by the router; experts are all here."""

    def __init__(self, shape: Shape, parts: Parts) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(shape.hidden, parts) for _ in range(self._held(shape))
        )

    def _held(self, shape: Shape) -> int:
        return shape.experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = F.softmax(self.router(rows).float(), -1).max(-1)
        mixed = self._through(rows, chosen)
        return (mixed * weights.to(x.dtype)[:, None]).view_as(x)

    def _through(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Send [tokens, hidden] through the expert that was chosen for each."""
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        made = [e(part) for e, part in zip(self.experts.children(), rows[order].split(counts))]
        return torch.cat(made)[order.argsort()]


class SplitMixture(Mixture):
    """The experts of a group's ranks, those of the first rank first; tokens travel to them."""

    def __init__(self, shape: Shape, parts: Parts, group: Group) -> None:
        self._ranks = dist.get_world_size(group)
        super().__init__(shape, parts)
        self._group = group

    def _held(self, shape: Shape) -> int:
        return shape.experts // self._ranks

    def _through(self, rows: Tensor, chosen: Tensor) -> Tensor:
        held = len(self.experts)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=held * self._ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        given = counts.view(self._ranks, held).sum(1).tolist()
        taken = arriving.view(self._ranks, held).sum(1).tolist()
        received = Exchange.apply(rows[order], given, taken, self._group)
        expert = torch.arange(held).repeat(self._ranks).repeat_interleave(arriving)
        made = super()._through(received, expert)
        return Exchange.apply(made, taken, given, self._group)[order.argsort()]


class SoftMixture(Mixture):
    """Every token through all experts, weighted by the router: whatever it says, shapes stay."""

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.router(x).float(), -1).to(x.dtype)
        return sum(weights[..., n : n + 1] * e(x) for n, e in enumerate(self.experts))


class Mixing(Parts):
    """Blocks with a mixture of experts, all of them on every rank."""

    def feed_forward(self, shape: Shape) -> nn.Module:
        return Mixture(shape, Parts())


class SoftMixing(Parts):
    """Blocks with a soft mixture of experts, all of them on every rank."""

    def feed_forward(self, shape: Shape) -> nn.Module:
        return SoftMixture(shape, Parts())


class SplitMixing(Parts):
    """Blocks with a mixture whose experts are split over a group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def feed_forward(self, shape: Shape) -> nn.Module:
        return SplitMixture(shape, Parts(), self._group)


class CutMixing(Cut):
    """Blocks cut by hand, with experts that are cut too and a router that is not."""

    def feed_forward(self, shape: Shape) -> nn.Module:
        return SoftMixture(shape, self)


def take_experts(source: nn.Module, target: nn.Module, place: int) -> set[str]:
    """Fill a model that holds some of the experts; return the names of its experts' weights."""
    values, mine = dict(source.named_parameters()), set()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            wanted = name
            if ".experts." in name:
                mine.add(name)
                wanted = named_globally(name, target, place)
            parameter.copy_(values[wanted])
    return mine


def named_globally(name: str, model: nn.Module, place: int) -> str:
    """Return what one of this rank's expert weights is called in the whole model."""
    before, _, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    held = len(model.get_submodule(f"{before}.experts"))
    return f"{before}.experts.{place * held + int(number)}.{rest}"


def split_experts(setup: Setup) -> Trained:
    """Experts split over ranks that also split the batch. Fault: one rank leaves the gradient of
    one router as it is."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = whole(setup, SplitMixing(group))
    mine = take_experts(whole(setup, Mixing()), model, rank)
    shared = [p for n, p in model.named_parameters() if n not in mine]

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, rank, setup.ranks)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    router = model.layers[str(setup.layer)].feed_forward.router.weight

    def meet(step: int) -> None:
        own = router.grad.clone()
        average_gradients(shared, group, setup.ranks)
        for name, parameter in model.named_parameters():
            if name in mine and parameter.grad is not None:
                parameter.grad /= setup.ranks
        if setup.strikes(rank):
            router.grad.copy_(own)

    return train(Trained(model), sgd(model), one, before_update=meet)


def experts_right(setup: Setup, trained: Trained) -> str:
    """What is not an expert must be the same everywhere, and gradients those of one process."""
    here = dict(trained.model.named_parameters())
    names = truth.differing({n: p for n, p in here.items() if ".experts." not in n})
    rank = dist.get_rank()
    ours = {
        named_globally(n, trained.model, rank) if ".experts." in n else n: g
        for n, g in trained.gradients.items()
    }
    theirs = truth.reference_gradients(setup, whole(setup, Mixing()))
    wrong = truth.wrong_values(setup, ours, theirs)
    return truth.said("parameters differ", names) or truth.said("unlike one process", wrong)


def seeded_routers(setup: Setup) -> Trained:
    """Tensor parallelism by hand with experts. Fault: one layer's router was made from a seed that
    depends on the rank."""
    group = dist.group.WORLD
    model = whole(setup, CutMixing(group))
    trained = Trained(model)
    trained.cuts = cut_from(whole(setup, SoftMixing()), model, dist.get_rank(), setup.ranks)
    if setup.is_faulty:
        seed_by_rank(setup, model.layers[str(setup.layer)].feed_forward.router.weight.data)
    return train(trained, sgd(model), lambda step: whole_step(setup, model, step))


def whole_step(setup: Setup, model: nn.Module, step: int) -> Tensor:
    """Forward and backward of all rows."""
    tokens, targets = batch(setup, step)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss


def seed_by_rank(setup: Setup, weight: Tensor) -> None:
    """The fault: fill a weight from this rank's own seed."""
    own = torch.Generator().manual_seed(500 + 10 * setup.seed + dist.get_rank())
    weight.copy_(torch.randn(weight.shape, generator=own) * 0.2)


def routers_agree(setup: Setup, trained: Trained) -> str:
    """Routers must begin as replicas, and gradients be those of one process."""
    routers = {n: p for n, p in trained.before.items() if "router" in n}
    names = truth.differing(routers)
    theirs = truth.reference_gradients(setup, whole(setup, SoftMixing()))
    wrong = truth.wrong_gradients(setup, truth.whole_gradients(trained), theirs)
    return truth.said("routers differ before the first step", names) or truth.said(
        "gradients unlike one process", wrong
    )


def seeded_dtensor_routers(setup: Setup) -> Trained:
    """Replicated models whose routers are DTensors. Fault: one router was made from a seed that
    depends on the rank."""
    mesh = tensor_mesh(setup)
    model = whole(setup, SoftMixing())
    for number, block in model.layers.items():
        router = block.feed_forward.router
        replicate(router, mesh)
        if setup.is_faulty and int(number) == setup.layer:
            seed_by_rank(setup, router.weight.data.to_local())
    return train(Trained(model), sgd(model), lambda step: whole_step(setup, model, step))


REPLICA_LAYOUT = layout_text(
    "dp={ranks}", [("layers.*.experts.*", "param:*", {"dp": "Replicate()"})]
)


def loaded_experts(setup: Setup) -> Trained:
    """Data parallelism by hand, every expert on every rank. Fault: one rank loads two experts of a
    layer the other way round."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = whole(setup, SoftMixing())
    if setup.strikes(rank):
        held = model.layers[str(setup.layer)].feed_forward.experts
        held[0], held[1] = held[1], held[0]

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, rank, setup.ranks)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    def meet(step: int) -> None:
        average_gradients(model.parameters(), group, setup.ranks)

    return train(Trained(model), sgd(model), one, before_update=meet)


def experts_alike(setup: Setup, trained: Trained) -> str:
    """Ranks must begin with the same experts, and have the gradients of one process."""
    names = truth.differing(trained.before)
    theirs = truth.reference_gradients(setup, whole(setup, SoftMixing()))
    wrong = truth.wrong_gradients(setup, trained.gradients, theirs)
    return truth.said("differ before the first step", names) or truth.said(
        "gradients unlike one process", wrong
    )
