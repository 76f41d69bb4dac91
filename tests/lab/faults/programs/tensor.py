"""Programs that split layers over tensor-parallel ranks, by hand and with DTensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.lab.faults import truth
from tests.lab.faults.layouttext import layout_text
from tests.lab.faults.model import batch, cut_from, loss_of, whole
from tests.lab.faults.parallel import Cut
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.setup import Setup, Trained, train

LAYOUT = layout_text(
    "tp={ranks}",
    [(f"layers.*.{name}", "output", {"tp": "Replicate()"}) for name in ("o_proj", "down_proj")],
)


def one_step(setup: Setup, model: nn.Module, step: int, part: int = 0, parts: int = 1) -> Tensor:
    """Forward and backward of the rows of one data rank."""
    tokens, targets = batch(setup, step, part, parts)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss


def cut_by_hand(setup: Setup, group: dist.ProcessGroup) -> Trained:
    """This rank's slices of the model."""
    model = whole(setup, Cut(group))
    place, places = dist.get_rank(group), dist.get_world_size(group)
    return Trained(model, cuts=cut_from(whole(setup), model, place, places))


def by_hand(setup: Setup) -> Trained:
    """Tensor parallelism by hand. Fault: one row-parallel layer does not sum over ranks."""
    trained = cut_by_hand(setup, dist.group.WORLD)
    row = trained.model.layers[str(setup.layer)].attention.o_proj
    row.is_reducing = not setup.is_faulty
    optimizer = sgd(trained.model)
    return train(trained, optimizer, lambda step: one_step(setup, trained.model, step))


def replicas_and_slices_right(setup: Setup, trained: Trained) -> str:
    """What is not cut must be the same everywhere, and all gradients those of one process."""
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    names = truth.differing(kept)
    return truth.said("replicated parameters differ", names) or truth.like_one_process(
        setup, trained
    )


PLAN = {
    "embed": RowwiseParallel,
    "positions": ColwiseParallel,  # rows would leave the fourth rank none, which torch cannot index
    "layers.*.attention.q_proj": ColwiseParallel,
    "layers.*.attention.k_proj": ColwiseParallel,
    "layers.*.attention.v_proj": ColwiseParallel,
    "layers.*.attention.o_proj": RowwiseParallel,
    "layers.*.feed_forward.up_proj": ColwiseParallel,
    "layers.*.feed_forward.down_proj": RowwiseParallel,
    "head": ColwiseParallel,
}
OPTIONS = {
    "embed": {"input_layouts": Replicate()},
    "positions": {"output_layouts": Replicate()},
    "head": {"output_layouts": Replicate()},
}


class RowwiseUnreduced(RowwiseParallel):
    """The fault: hands out this rank's partial sums as they are."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: object, use_local_output: bool, mod: nn.Module, outputs: DTensor, _: object
    ) -> Tensor:
        return outputs.to_local()


def parallelized(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split a model over a mesh of one axis; norms are DTensors too, replicated."""
    plan = {path: kind(**OPTIONS.get(path, {})) for path, kind in PLAN.items()}
    parallelize_module(model, mesh, plan)
    for module in [m for m in model.modules() if isinstance(m, nn.RMSNorm)]:
        replicate(module, mesh)
    return model


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's parameters replicated DTensors; tensors outside stay plain."""
    distribute_module(
        module,
        mesh,
        input_fn=lambda _, given, mesh: DTensor.from_local(
            given[0], mesh, [Replicate()], run_check=False
        ),
        output_fn=lambda _, made, mesh: made.to_local(),
    )


def tensor_mesh(setup: Setup) -> DeviceMesh:
    return init_device_mesh("cpu", (setup.ranks,), mesh_dim_names=("tp",))


def with_dtensor(setup: Setup) -> Trained:
    """Tensor parallelism with DTensor. Fault: one row-parallel layer hands out partial sums."""
    mesh = tensor_mesh(setup)
    model = whole(setup)
    if setup.is_faulty:
        row = model.layers[str(setup.layer)].attention.o_proj
        parallelize_module(row, mesh, RowwiseUnreduced())
        left = {p: k for p, k in PLAN.items() if not p.endswith("o_proj")}
        plan = {path: kind(**OPTIONS.get(path, {})) for path, kind in left.items()}
        others = (n for n in range(setup.shape.layers) if n != setup.layer)
        plan |= {f"layers.{n}.attention.o_proj": RowwiseParallel() for n in others}
        parallelize_module(model, mesh, plan)
        for module in [m for m in model.modules() if isinstance(m, nn.RMSNorm)]:
            replicate(module, mesh)
    else:
        parallelized(model, mesh)
    trained = Trained(model)
    return train(trained, sgd(model), lambda step: one_step(setup, model, step))


def replicated_agree(setup: Setup, trained: Trained) -> str:
    """Parameters that DTensor calls replicated must be the same everywhere."""
    kept = {n: p for n, p in trained.model.named_parameters() if is_replicated(p)}
    names = truth.differing(kept)
    return truth.said("replicated parameters differ", names) or truth.like_one_process(
        setup, trained
    )


def is_replicated(value: Tensor) -> bool:
    return isinstance(value, DTensor) and all(p.is_replicate() for p in value.placements)


def clipping(setup: Setup) -> Trained:
    """Clip to the norm over all ranks. Fault: only one rank scales its gradients."""
    model = parallelized(whole(setup), tensor_mesh(setup))
    optimizer = sgd(model)

    def clip(step: int) -> None:
        held = [p.grad for p in model.parameters()]
        squares = torch.zeros(1)
        for gradient in held:
            share = 1 / setup.ranks if is_replicated(gradient) else 1.0
            squares += truth.local(gradient).float().square().sum() * share
        dist.all_reduce(squares)
        if not setup.is_faulty or dist.get_rank() == setup.culprit:
            for gradient in held:
                truth.local(gradient).mul_(float(0.1 / squares.sqrt()))

    return train(
        Trained(model), optimizer, lambda step: one_step(setup, model, step), before_update=clip
    )


def clipped_alike(setup: Setup, trained: Trained) -> str:
    """Replicated gradients must be the same everywhere, and the norm of all what was asked for."""
    kept = {n: g for n, g in trained.gradients.items() if is_replicated(g)}
    names = truth.differing(kept)
    found = truth.whole_gradients(trained)
    norm = torch.stack([g.double().norm() for g in found.values()]).norm()
    wrong = [f"{float(norm):.4f}"] if abs(norm - 0.1) > 0.005 else []
    return truth.said("replicated gradients differ", names) or truth.said("norm, not 0.1", wrong)


def double_counting(setup: Setup) -> Trained:
    """Tensor parallelism. Fault: one rank adds one norm's gradient twice."""
    model = parallelized(whole(setup), tensor_mesh(setup))
    norm = model.layers[str(setup.layer)].feed_forward_norm

    def count_again(step: int) -> None:
        if setup.strikes(dist.get_rank()):
            gradient = truth.local(norm.weight.grad)
            gradient.add_(gradient.clone())

    return train(
        Trained(model),
        sgd(model),
        lambda step: one_step(setup, model, step),
        before_update=count_again,
    )


def gradients_agree(setup: Setup, trained: Trained) -> str:
    """Gradients that DTensor calls replicated must be the same everywhere."""
    kept = {n: g for n, g in trained.gradients.items() if is_replicated(g)}
    names = truth.differing(kept)
    return truth.said("replicated gradients differ", names) or truth.like_one_process(
        setup, trained
    )


class Lift(nn.Module):
    """Plain tensors to a DTensor that is said to be the same on all ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, inner: nn.Module, is_lying: bool) -> None:
        super().__init__()
        self._mesh, self._is_lying = mesh, is_lying
        self.inner = inner
        self.entered: list[Tensor] = []
        """What was called replicated, for the oracle."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.1 if self._is_lying else x
        self.entered.append(x.detach().clone())
        entered = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        return self.inner(entered).to_local()


def lifted(setup: Setup) -> Trained:
    """One feed-forward works on DTensors throughout, its input lifted by hand. Fault: on one rank
    the plain tensor was scaled before."""
    mesh = tensor_mesh(setup)
    model = whole(setup)
    options = {"use_local_output": False}
    for block in model.layers.values():
        inside = {"up_proj": ColwiseParallel(**options), "down_proj": RowwiseParallel(**options)}
        parallelize_module(block.feed_forward, mesh, inside)
    for number, block in model.layers.items():
        is_lying = setup.strikes(dist.get_rank(), int(number))
        block.feed_forward = Lift(mesh, block.feed_forward, is_lying)
    trained = Trained(model)
    trained = train(trained, sgd(model), lambda step: one_step(setup, model, step))
    trained.gradients = {n.replace(".inner", ""): g for n, g in trained.gradients.items()}
    return trained


def entered_alike(setup: Setup, trained: Trained) -> str:
    """What was called replicated must be the same everywhere, and gradients as in one process."""
    lifts = {n: b.feed_forward.entered[0] for n, b in trained.model.layers.items()}
    return truth.said("lifted differently in layers", truth.differing(lifts)) or (
        truth.like_one_process(setup, trained)
    )


def dtype_left_behind(setup: Setup) -> Trained:
    """Tensor parallelism by hand. Fault: on one rank a layer's norm was left in another dtype."""
    trained = cut_by_hand(setup, dist.group.WORLD)
    other = torch.float32 if setup.dtype == "bfloat16" else torch.bfloat16
    if setup.strikes(dist.get_rank()):
        trained.model.layers[str(setup.layer)].feed_forward_norm.to(other)
    return train(trained, sgd(trained.model), lambda step: one_step(setup, trained.model, step))


def dtypes_agree(setup: Setup, trained: Trained) -> str:
    """Every parameter must have the same dtype on all ranks."""
    here = {n: str(p.dtype) for n, p in trained.model.named_parameters()}
    every: list[dict[str, str]] = [{}] * setup.ranks
    dist.all_gather_object(every, here)
    names = sorted(n for n in here if len({held[n] for held in every}) > 1)
    return truth.said("dtypes differ", names) or replicas_and_slices_right(setup, trained)


def with_dropout(setup: Setup) -> Trained:
    """Tensor parallelism by hand, with dropout on what is cut: every rank has a seed of its own for
    it, as it should."""
    trained = cut_by_hand(setup, dist.group.WORLD)
    for block in trained.model.layers.values():
        block.feed_forward.act = nn.Sequential(nn.GELU(), nn.Dropout(0.2))
    torch.manual_seed(1_000 * setup.seed + dist.get_rank())
    return train(trained, sgd(trained.model), lambda step: one_step(setup, trained.model, step))


def kept_agree(setup: Setup, trained: Trained) -> str:
    """What is not cut must stay the same on all ranks."""
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    return truth.said("replicated parameters differ", truth.differing(kept))
