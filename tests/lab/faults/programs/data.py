"""Programs that split the batch: DDP and FSDP2."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.lab.faults import truth
from tests.lab.faults.model import Block, batch, loss_of, whole
from tests.lab.faults.setup import RATE, Setup, Trained, train


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def step_of(setup: Setup, called: nn.Module, step: int, same_rows: bool = False) -> Tensor:
    """Forward and backward of this data rank's rows."""
    tokens, targets = batch(setup, step, 0 if same_rows else dist.get_rank(), setup.ranks)
    loss = loss_of(called(tokens), targets)
    loss.backward()
    return loss


def ddp(setup: Setup) -> Trained:
    """Train replicas. Fault: the loop calls the module inside the DDP wrapper."""
    model = whole(setup)
    wrapped = DDP(model)
    called = wrapped.module if setup.is_faulty else wrapped
    trained = Trained(model)
    return train(trained, sgd(model), lambda step: step_of(setup, called, step))


def replicas_agree(setup: Setup, trained: Trained) -> str:
    """Parameters after training must be the same on all ranks, gradients those of one process."""
    names = truth.differing(dict(trained.model.named_parameters()))
    return truth.said("parameters differ over ranks", names) or truth.like_one_process(
        setup, trained
    )


def ddp_accumulating(setup: Setup) -> Trained:
    """Accumulate two halves of the rows. Fault: the last one is inside `no_sync` as well."""
    model = whole(setup)
    wrapped = DDP(model)
    trained = Trained(model)

    def step_in_halves(step: int) -> Tensor:
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        losses = []
        for n, (x, y) in enumerate(zip(tokens.chunk(2), targets.chunk(2))):
            is_held = n == 0 or setup.is_faulty
            with wrapped.no_sync() if is_held else contextlib.nullcontext():
                losses.append(loss_of(wrapped(x), y) / 2)
                losses[-1].backward()
        return torch.stack(losses).sum()

    return train(trained, sgd(model), step_in_halves)


def ddp_on_shared_rows(setup: Setup) -> Trained:
    """Train replicas. Fault: every rank takes the rows of rank 0."""
    model = whole(setup)
    wrapped = DDP(model)
    trained = Trained(model)

    def one(step: int) -> Tensor:
        tokens, _ = batch(setup, step, 0 if setup.is_faulty else dist.get_rank(), setup.ranks)
        trained.note("rows", tokens)
        return step_of(setup, wrapped, step, same_rows=setup.is_faulty)

    return train(trained, sgd(model), one)


def rows_differ(setup: Setup, trained: Trained) -> str:
    """Ranks must have trained on different rows, and as one process does."""
    held = truth.everywhere(trained.seen["rows"][0])
    same = [f"rank {r}" for r in range(1, setup.ranks) if torch.equal(held[0], held[r])]
    return truth.said("rows of rank 0 again", same) or truth.like_one_process(setup, trained)


def ddp_with_dropout(setup: Setup) -> Trained:
    """Train replicas whose dropout has a seed of its own on every rank, as it should."""
    torch.manual_seed(1_000 * setup.seed + dist.get_rank())
    model = whole(setup, dropout=0.3)
    wrapped = DDP(model)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def parameters_agree(setup: Setup, trained: Trained) -> str:
    """Parameters after training must be the same on all ranks."""
    names = truth.differing(dict(trained.model.named_parameters()))
    return truth.said("parameters differ over ranks", names)


def ddp_compiled(setup: Setup) -> Trained:
    """Train replicas whose model is compiled."""
    torch._dynamo.reset()
    model = whole(setup)
    wrapped = DDP(torch.compile(model, backend="aot_eager"))
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def ddp_autocast(setup: Setup) -> Trained:
    """Train replicas under bf16 autocast."""
    model = whole(setup)
    wrapped = DDP(model)

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(wrapped(tokens), targets)
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)


def about_one_process(setup: Setup, trained: Trained) -> str:
    """Parameters agree, and gradients are those of one process within the rounding of bf16."""
    rounded = Setup(shape=setup.shape, ranks=setup.ranks, dtype="bfloat16", seed=setup.seed)
    truth_here = truth.reference_gradients(setup)
    names = truth.wrong_gradients(rounded, trained.gradients, truth_here)
    return parameters_agree(setup, trained) or truth.said("unlike one process", names)


def sharded(setup: Setup) -> nn.Module:
    """The model with every layer, and the rest, sharded over all ranks."""
    mesh = init_device_mesh("cpu", (setup.ranks,), mesh_dim_names=("dp",))
    model = whole(setup)
    return fully_sharded(model, mesh)


def fully_sharded(model: nn.Module, mesh: object) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2(setup: Setup) -> Trained:
    """Train shards; vocabulary and positions split unevenly."""
    model = sharded(setup)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, model, step))


def fsdp2_with_optimizer(setup: Setup) -> Trained:
    """Train shards. Fault: the optimizer was built before `fully_shard`, so it holds tensors that
    the model has no more."""
    mesh = init_device_mesh("cpu", (setup.ranks,), mesh_dim_names=("dp",))
    model = whole(setup)
    early = sgd(model)
    fully_sharded(model, mesh)
    optimizer = early if setup.is_faulty else sgd(model)
    return train(Trained(model), optimizer, lambda step: step_of(setup, model, step))


def parameters_move(setup: Setup, trained: Trained) -> str:
    """Every parameter must move on some rank (an update of a bf16 shard may round to nothing, a
    shard may have no elements), with gradients as in one process."""
    moved = truth.united(truth.moved(trained))
    stuck = sorted(trained.before.keys() - set(moved))
    return truth.said("never moved", stuck) or truth.like_one_process(setup, trained)


def fsdp2_accumulating(setup: Setup) -> Trained:
    """Checkpoint every layer and accumulate two halves of the rows before the gradients meet."""
    mesh = init_device_mesh("cpu", (setup.ranks,), mesh_dim_names=("dp",))
    model = whole(setup)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, Block),
    )
    fully_sharded(model, mesh)

    def step_in_halves(step: int) -> Tensor:
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        losses = []
        for n, (x, y) in enumerate(zip(tokens.chunk(2), targets.chunk(2))):
            model.set_requires_gradient_sync(n == 1)
            losses.append(loss_of(model(x), y) / 2)
            losses[-1].backward()
        return torch.stack(losses).sum()

    trained = train(Trained(model), sgd(model), step_in_halves)
    trained.gradients = {without_wrapper(n): g for n, g in trained.gradients.items()}
    return trained


def without_wrapper(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def ddp_checkpointing(setup: Setup, is_checkpointed: bool = True) -> Trained:
    """Checkpoint every layer, with dropout. Fault: one of them does not restore the random state,
    so that its recomputation drops other elements."""
    torch.manual_seed(1_000 * setup.seed + dist.get_rank())
    model = whole(setup, dropout=0.3)
    for number, layer in model.layers.items() if is_checkpointed else ():
        keeps = not (setup.is_faulty and int(number) == setup.layer)
        model.layers[number] = checkpoint_wrapper(layer, preserve_rng_state=keeps)
    wrapped = DDP(model)
    trained = train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))
    trained.gradients = {without_wrapper(n): g for n, g in trained.gradients.items()}
    return trained


def as_without_checkpoints(setup: Setup, trained: Trained) -> str:
    """The first gradients must be, bit for bit, those of the same loop without checkpoints."""
    plain = ddp_checkpointing(setup, is_checkpointed=False).gradients
    wrong = [n for n, g in trained.gradients.items() if not torch.equal(g, plain[n])]
    return truth.said("gradients unlike those without checkpoints", truth.united(wrong))
