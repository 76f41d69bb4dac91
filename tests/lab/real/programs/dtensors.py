"""Programs that leave the bookkeeping to DTensor, and lose it where a plain tensor comes out."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.lab.faults import truth
from tests.lab.faults.model import whole
from tests.lab.faults.parallel import average_gradients
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.mesh import mesh_2x2
from tests.lab.faults.programs.tensor import (
    OPTIONS,
    PLAN,
    is_replicated,
    one_step,
    parallelized,
    tensor_mesh,
)
from tests.lab.faults.setup import Setup, Trained, train


class GatherRows(nn.Module):
    """This rank's rows to the rows of all ranks, as a DTensor that every rank holds whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def forward(self, x: Tensor) -> DTensor:
        held = DTensor.from_local(x, self._mesh, [Shard(0)], run_check=False)
        return held.redistribute(placements=[Replicate()])


class Contrast(nn.Module):
    """Every rank holds its own rows against all rows: the gradients of what was gathered are
    partial sums. Bug: `to_local` calls them replicated, so nobody sums them."""

    def __init__(self, is_saying_partial: bool) -> None:
        super().__init__()
        self._placements = [Partial()] if is_saying_partial else None

    def forward(self, own: Tensor, gathered: DTensor) -> Tensor:
        return own @ gathered.to_local(grad_placements=self._placements).t()


class Encoder(nn.Module):
    """Rows [n, 12] to similarities [n, all rows]."""

    def __init__(self, gather: nn.Module, contrast: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(12, 16)
        self.fc2 = nn.Linear(16, 6)
        self.gather = gather
        self.contrast = contrast

    def forward(self, x: Tensor) -> Tensor:
        made = F.normalize(self.fc2(F.gelu(self.fc1(x))), dim=-1)
        return self.contrast(made, self.gather(made))


def gathered(setup: Setup) -> Trained:
    """A contrastive loss over the rows of all ranks, gathered by `redistribute`."""
    contrast = Contrast(is_saying_partial=not setup.is_faulty)
    return contrasted(setup, GatherRows(tensor_mesh(setup)), contrast)


def contrasted(setup: Setup, gather: nn.Module, contrast: nn.Module) -> Trained:
    """Train an encoder whose rows are held against those of all ranks."""
    torch.manual_seed(60 + setup.seed)
    model = Encoder(gather, contrast)

    def one(step: int) -> Tensor:
        rank = dist.get_rank()
        x = features(setup, step).chunk(setup.ranks)[rank]
        rows = torch.arange(len(x)) + rank * len(x)
        loss = F.cross_entropy(model(x) / 0.3, (rows + 1) % (len(x) * setup.ranks))
        loss.backward()
        return loss

    return train(
        Trained(model),
        sgd(model),
        one,
        before_update=lambda step: average_gradients(
            model.parameters(), dist.group.WORLD, setup.ranks
        ),
    )


def features(setup: Setup, step: int) -> Tensor:
    chooser = torch.Generator().manual_seed(8_000 + 100 * setup.seed + step)
    return torch.randn(8, 12, generator=chooser)


class Alone(nn.Module):
    """What one process has in place of a gather."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class AloneContrast(nn.Module):
    """Every row against all rows."""

    def forward(self, own: Tensor, every: Tensor) -> Tensor:
        return own @ every.t()


def contrast_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process with all rows."""
    torch.manual_seed(60 + setup.seed)
    alone = Encoder(Alone(), AloneContrast())
    x = features(setup, 0)
    F.cross_entropy(alone(x) / 0.3, (torch.arange(len(x)) + 1) % len(x)).backward()
    theirs = {n: p.grad for n, p in alone.named_parameters()}
    names = truth.wrong_gradients(setup, trained.gradients, theirs)
    return truth.said("gradients unlike one process", names)


class LocalNorm(nn.Module):
    """A norm over one head's width whose weight is a replicated DTensor and whose input is plain,
    this rank's heads. Bug: `to_local` does not say that the weight's gradient is partial."""

    def __init__(self, width: int, mesh: DeviceMesh, is_saying_partial: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(width), mesh, [Replicate()]))
        self._placements = [Partial()] if is_saying_partial else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local(grad_placements=self._placements)
        return F.rms_norm(x, weight.shape, weight, 1e-6)


class WholeNorm(nn.Module):
    """The same norm of one process."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def per_head(norm: nn.Module, projection: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(projection, nn.Unflatten(-1, (-1, width)), norm, nn.Flatten(-2))


def head_norms(setup: Setup) -> Trained:
    """DTensor tensor parallelism with a norm on every head of the queries."""
    mesh = tensor_mesh(setup)
    model = parallelized(whole(setup), mesh)
    width = setup.shape.hidden // setup.shape.heads
    for block in model.layers.values():
        norm = LocalNorm(width, mesh, is_saying_partial=not setup.is_faulty)
        block.attention.q_proj = per_head(norm, block.attention.q_proj, width)
    return train(Trained(model), sgd(model), lambda step: one_step(setup, model, step))


def head_norms_right(setup: Setup, trained: Trained) -> str:
    """What DTensor calls replicated must be the same everywhere, gradients those of one process."""
    alone = whole(setup)
    width = setup.shape.hidden // setup.shape.heads
    for block in alone.layers.values():
        block.attention.q_proj = per_head(WholeNorm(width), block.attention.q_proj, width)
    theirs = truth.reference_gradients(setup, alone)
    kept = {n: g for n, g in trained.gradients.items() if is_replicated(g)}
    names = truth.differing(kept)
    return truth.said("replicated gradients differ", names) or truth.said(
        "gradients unlike one process",
        truth.wrong_gradients(setup, truth.whole_gradients(trained), theirs),
    )


def other_mesh(setup: Setup) -> Trained:
    """Data parallel by hand beside DTensor tensor parallelism. Bug: one feed-forward is split over
    the data-parallel axis, whose ranks have other rows."""
    mesh = mesh_2x2(setup)
    rows = mesh["dp"].get_group()
    model = whole(setup)
    feed_forward = model.layers[str(setup.layer)].feed_forward
    inside = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    if setup.is_faulty:
        parallelize_module(feed_forward, mesh["dp"], inside)
    prefix = f"layers.{setup.layer}.feed_forward."
    plan = {path: kind(**OPTIONS.get(path, {})) for path, kind in PLAN.items() if path != "head"}
    plan = {p: k for p, k in plan.items() if "feed_forward" not in p and p != "positions"}
    for number in model.layers:
        here = f"layers.{number}.feed_forward."
        if here != prefix or not setup.is_faulty:
            plan |= {here + path: kind for path, kind in inside.items()}
    parallelize_module(model, mesh["tp"], plan)
    trained = Trained(model)
    kept = [p for n, p in model.named_parameters() if not (setup.is_faulty and prefix in n)]

    def meet(step: int) -> None:
        for parameter in kept:
            gradient = truth.local(parameter.grad)
            dist.all_reduce(gradient, group=rows)
            gradient /= setup.ranks // 2

    return train(
        trained,
        sgd(model),
        lambda step: one_step(setup, model, step, mesh.get_local_rank("dp"), setup.ranks // 2),
        before_update=meet,
    )


def replicas_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process, whatever axis they are split over."""
    return truth.like_one_process(setup, trained)


def of_two(setup: Setup) -> Setup:
    """The same run of a model of two layers: only one is left that is right."""
    return replace(setup, shape=replace(setup.shape, layers=2))


def other_mesh_of_two(setup: Setup) -> Trained:
    return other_mesh(of_two(setup))


def of_two_right(setup: Setup, trained: Trained) -> str:
    return replicas_right(of_two(setup), trained)


def tied(setup: Setup) -> Trained:
    """The head shares its weight with the embedding. Bug: `parallelize_module` gives each of them a
    parameter of its own, and nobody ties them again."""
    mesh = tensor_mesh(setup)
    model = whole(setup)
    model.head.weight = model.embed.weight
    parallelized(model, mesh)
    if not setup.is_faulty:
        model.head.weight = model.embed.weight
    return train(Trained(model), sgd(model), lambda step: one_step(setup, model, step))


def still_tied(setup: Setup, trained: Trained) -> str:
    """Embedding and head must be equal after training, with the gradient of one process."""
    alone = whole(setup)
    alone.head.weight = alone.embed.weight
    theirs = truth.reference_gradients(setup, alone)
    head, embed = (m.weight.full_tensor() for m in (trained.model.head, trained.model.embed))
    names = [] if torch.equal(head, embed) else ["head and embed"]
    return truth.said("no longer one weight", names) or truth.said(
        "gradients unlike one process",
        truth.wrong_gradients(setup, truth.whole_gradients(trained), theirs),
    )


class GatherWhole(nn.Module):
    """This rank's rows to the rows of all ranks, as a plain tensor. Bug: `full_tensor` takes it for
    granted that the gradients of what it gave are the same on all ranks."""

    def __init__(self, mesh: DeviceMesh, is_saying_partial: bool) -> None:
        super().__init__()
        self._mesh = mesh
        self._placements = [Partial()] if is_saying_partial else None

    def forward(self, x: Tensor) -> Tensor:
        held = DTensor.from_local(x, self._mesh, [Shard(0)], run_check=False)
        return held.full_tensor(grad_placements=self._placements)


def gathered_whole(setup: Setup) -> Trained:
    """A contrastive loss over the rows of all ranks, gathered by `full_tensor`."""
    return contrasted(setup, GatherWhole(tensor_mesh(setup), not setup.is_faulty), AloneContrast())
