"""Programs whose parameters are sharded: FSDP1, FSDP2, and optimizers that keep their own part."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.lab.faults import truth
from tests.lab.faults.model import batch, loss_of, whole
from tests.lab.faults.parallel import average_gradients
from tests.lab.faults.programs.data import sgd, step_of
from tests.lab.faults.setup import RATE, Setup, Trained, train


class Classifier(nn.Module):
    """Features [rows, 12] to logits [rows, 5], with a norm between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(12, 16)
        self.norm = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.norm(self.fc1(x))))


def classifier(setup: Setup) -> Classifier:
    """The same weights on every rank."""
    torch.manual_seed(40 + setup.seed)
    return Classifier()


def rows_of(setup: Setup, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Features and classes: the share of one rank of the batch of one step."""
    chooser = torch.Generator().manual_seed(7_000 + 100 * setup.seed + step)
    x = torch.randn(8, 12, generator=chooser)
    y = torch.randint(5, (8,), generator=chooser)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def classified(setup: Setup, called: nn.Module, step: int) -> Tensor:
    """Forward and backward of this rank's rows."""
    x, y = rows_of(setup, step, dist.get_rank(), setup.ranks)
    loss = F.cross_entropy(called(x), y)
    loss.backward()
    return loss


def as_one_process(setup: Setup, model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the first step of one process that has all rows."""
    x, y = rows_of(setup, 0, 0, 1)
    F.cross_entropy(model(x), y).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def ignored_norm(setup: Setup) -> Trained:
    """FSDP1 that leaves a norm out. Bug: nobody reduces the norm's gradients; the twin does."""
    model = classifier(setup)
    norm = model.norm
    wrapped = FSDP(model, ignored_modules=[norm], device_id=torch.device("cpu"))

    def meet(step: int) -> None:
        if not setup.is_faulty:
            average_gradients(norm.parameters(), dist.group.WORLD, setup.ranks)

    trained = Trained(norm)
    return train(
        trained,
        sgd(wrapped),
        lambda step: classified(setup, wrapped, step),
        before_update=meet,
    )


def norm_right(setup: Setup, trained: Trained) -> str:
    """The norm must stay the same on all ranks, with the gradients of one process."""
    names = truth.differing(dict(trained.model.named_parameters()))
    found = as_one_process(setup, classifier(setup))
    theirs = {n.removeprefix("norm."): g for n, g in found.items() if n.startswith("norm.")}
    return truth.said("parameters differ over ranks", names) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, trained.gradients, theirs)
    )


def random_shards(setup: Setup) -> Trained:
    """FSDP2 built on the meta device, initialised as shards. Bug: with one seed for all ranks every
    rank draws the same numbers for its shard; the twin has a seed for each rank."""
    mesh = init_device_mesh("cpu", (setup.ranks,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = Classifier()
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(setup.seed if setup.is_faulty else 100 * setup.seed + dist.get_rank())
    for layer in (model.fc1, model.fc2):
        nn.init.normal_(layer.weight, std=0.3)
        nn.init.zeros_(layer.bias)
    model.norm.reset_parameters()
    return train(Trained(model), sgd(model), lambda step: classified(setup, model, step))


def shards_differ(setup: Setup, trained: Trained) -> str:
    """No two ranks may have begun with the same random shard."""
    repeated = []
    for name in ("fc1.weight", "fc2.weight"):
        held = truth.everywhere(trained.before[name])
        size = min(len(piece) for piece in held)
        if any(torch.equal(held[0][:size], piece[:size]) for piece in held[1:]):
            repeated.append(name)
    return truth.said("the same numbers in every shard of", repeated)


def clipped_shards(setup: Setup) -> Trained:
    """FSDP1 with clipping. Bug: `torch.nn.utils.clip_grad_norm_` takes the norm of this rank's
    shards alone; the twin calls the wrapper's own method."""
    model = FSDP(whole(setup), device_id=torch.device("cpu"))

    def clip(step: int) -> None:
        if setup.is_faulty:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            model.clip_grad_norm_(0.1)

    return train(
        Trained(model), sgd(model), lambda step: step_of(setup, model, step), before_update=clip
    )


def norm_as_asked(setup: Setup, trained: Trained) -> str:
    """The norm of all shards together must be what was asked for."""
    squares = sum(g.double().square().sum() for g in trained.gradients.values())
    dist.all_reduce(squares)
    norm = float(squares.sqrt())
    wrong = [f"{norm:.4f}"] if abs(norm - 0.1) > 0.001 else []
    return truth.said("norm of all gradients, not 0.1", wrong)


class PartitionedGradients:
    """ZeRO-2 in small: every backward hands its gradients, averaged over ranks, to the partition
    that a step will use. Bug: each hand-over replaces the one before."""

    def __init__(self, model: nn.Module, ranks: int, is_replacing: bool) -> None:
        self._model, self._ranks, self._is_replacing = model, ranks, is_replacing
        self._kept: dict[str, Tensor] = {}

    def take(self) -> None:
        """After every backward: reduce, keep, and free the gradients."""
        for name, parameter in self._model.named_parameters():
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            gradient /= self._ranks
            if name in self._kept and not self._is_replacing:
                gradient += self._kept[name]
            self._kept[name] = gradient
            parameter.grad = None

    def give(self) -> None:
        """Before the step: what was kept becomes the gradients."""
        for name, parameter in self._model.named_parameters():
            parameter.grad = self._kept.pop(name)


def partitioned_accumulation(setup: Setup) -> Trained:
    """Two micro-batches a step. Bug: only the last one's gradients reach the optimizer."""
    model = whole(setup)
    gradients = PartitionedGradients(model, setup.ranks, setup.is_faulty)

    def in_halves(step: int) -> Tensor:
        return accumulated(setup, model, step, after=gradients.take)

    return train(Trained(model), sgd(model), in_halves, before_update=lambda step: gradients.give())


def accumulated(
    setup: Setup, model: nn.Module, step: int, after: Callable[[], None] = lambda: None
) -> Tensor:
    """Forward and backward of the halves of this rank's rows, `after()` each."""
    tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
    losses = []
    for x, y in zip(tokens.chunk(2), targets.chunk(2)):
        losses.append(loss_of(model(x), y) / 2)
        losses[-1].backward()
        after()
    return torch.stack(losses).sum()


def accumulated_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process, and parameters the same on all ranks."""
    names = truth.differing(dict(trained.model.named_parameters()))
    return truth.said("parameters differ over ranks", names) or truth.like_one_process(
        setup, trained
    )


def lone_shards(setup: Setup) -> Trained:
    """FSDP1 on a mesh of replicas times shards. Bug: with one rank a shard group, FSDP1 turns to
    no sharding at all and reduces over that one rank; the twin reduces over all ranks."""
    model = whole(setup)
    names = ("ddp", "fsdp")
    if setup.is_faulty:
        mesh = init_device_mesh("cpu", (setup.ranks, 1), mesh_dim_names=names)
        how = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    else:
        how = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    wrapped = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, **how)
    trained = Trained(wrapped)
    return train(trained, sgd(wrapped), lambda step: step_of(setup, wrapped, step))


def lone_right(setup: Setup, trained: Trained) -> str:
    """Parameters must be the same on all ranks, gradients those of one process."""
    names = truth.differing(dict(trained.model.named_parameters()))
    ours = {n.replace("_fsdp_wrapped_module.", ""): g for n, g in trained.gradients.items()}
    theirs = {n: g.flatten() for n, g in truth.reference_gradients(setup).items()}
    flat = {n: g.flatten() for n, g in ours.items()}
    return truth.said("parameters differ over ranks", names) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, flat, theirs)
    )


def reduced_too_early(setup: Setup) -> Trained:
    """ZeRO-1 with accumulation in buffers: every rank steps its part of the parameters. Bug: the
    buffers are reduced before the last micro-batch is added."""
    model = whole(setup)
    kept = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    done = [0]

    def reduce() -> None:
        for buffer in kept.values():
            dist.all_reduce(buffer)
            buffer /= setup.ranks

    def take() -> None:
        done[0] += 1
        is_last = done[0] % 2 == 0
        if is_last and setup.is_faulty:
            reduce()
        for name, parameter in model.named_parameters():
            kept[name] += parameter.grad
            parameter.grad = None
        if is_last and not setup.is_faulty:
            reduce()

    def give(step: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.grad = kept[name].clone()
            kept[name].zero_()

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    return train(
        Trained(model),
        optimizer,
        lambda step: accumulated(setup, model, step, after=take),
        before_update=give,
    )


def partly_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be the same on all ranks, and those of one process."""
    return truth.said("gradients differ", truth.differing(trained.gradients)) or (
        truth.like_one_process(setup, trained)
    )
