"""Programs on meshes of two axes: tensor parallelism beside data parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.lab.faults import truth
from tests.lab.faults.layouttext import layout_text, weights
from tests.lab.faults.model import cut_from, whole
from tests.lab.faults.parallel import Cut, average_gradients
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.tensor import cut_by_hand, one_step, parallelized
from tests.lab.faults.setup import STEPS, Setup, Trained, train


def mesh_2x2(setup: Setup) -> DeviceMesh:
    return init_device_mesh("cpu", (setup.ranks // 2, 2), mesh_dim_names=("dp", "tp"))


class Spill(nn.Module):
    """An activation function that can be told to hand out one infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.is_spilling = False

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.gelu(x)
        if self.is_spilling:
            made = made.clone()
            made[0, 0, 0] = float("inf")
        return made


def fsdp2_tp(setup: Setup, steps: int = STEPS) -> Trained:
    """FSDP2 times tensor parallelism. Fault: at the last of four steps one activation of one rank
    holds an infinity."""
    mesh = mesh_2x2(setup)
    model = whole(setup)
    for block in model.layers.values():
        block.feed_forward.act = Spill()
    parallelized(model, mesh["tp"])
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    chosen = model.layers[str(setup.layer)].feed_forward.act
    trained = Trained(model)

    def one(step: int) -> Tensor:
        chosen.is_spilling = step == 3 and setup.strikes(dist.get_rank())
        loss = one_step(setup, model, step, mesh.get_local_rank("dp"), setup.ranks // 2)
        trained.note("loss", loss)
        return loss

    return train(trained, sgd(model), one, steps=steps)


def fsdp2_tp_four_steps(setup: Setup) -> Trained:
    return fsdp2_tp(setup, steps=4)


def finite(setup: Setup, trained: Trained) -> str:
    """Every loss and every parameter must be finite; gradients those of one process."""
    now = dict(trained.model.named_parameters())
    spoiled = [n for n, p in now.items() if not truth.local(p).isfinite().all()]
    spoiled += [f"loss of step {n}" for n, x in enumerate(trained.seen["loss"]) if not x.isfinite()]
    return truth.said("not finite", truth.united(spoiled)) or truth.like_one_process(setup, trained)


MIXED_LAYOUT = layout_text(
    "dp={rows},tp=2",
    weights({"dp": "Replicate()", "tp": "Shard(0)"}, "layers.*.[qkv]_proj", "layers.*.up_proj"),
)


def loading(setup: Setup) -> Trained:
    """Tensor times data parallelism by hand, slices loaded from a whole state. Fault: the second
    data row takes the slices of one weight in the other order."""
    rank = dist.get_rank()
    rows = [dist.new_group([n, n + 1]) for n in range(0, setup.ranks, 2)]
    columns = [dist.new_group(list(range(n, setup.ranks, 2))) for n in range(2)]
    trained = cut_by_hand(setup, rows[rank // 2])
    if setup.is_faulty and rank >= 2:
        path = f"layers.{setup.layer}.attention.q_proj.weight"
        taken = dict(whole(setup).named_parameters())[path].detach().chunk(2)[1 - rank % 2]
        dict(trained.model.named_parameters())[path].data.copy_(taken)

    def meet(step: int) -> None:
        average_gradients(trained.model.parameters(), columns[rank % 2], setup.ranks // 2)

    return train(
        trained,
        sgd(trained.model),
        lambda step: one_step(setup, trained.model, step, rank // 2, setup.ranks // 2),
        before_update=meet,
    )


def loaded_alike(setup: Setup, trained: Trained) -> str:
    """Data rows must begin with the same slices, and have the gradients of one process."""
    teams = [list(range(n, setup.ranks, 2)) for n in range(2)]
    names = truth.differing(trained.before, teams)
    rank = dist.get_rank()
    rows = [dist.new_group([n, n + 1]) for n in range(0, setup.ranks, 2)]
    found = truth.whole_gradients(trained, rows[rank // 2])
    return truth.said("slices differ between data rows", names) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, found)
    )


def grouped(setup: Setup) -> Trained:
    """Tensor parallelism over ranks 0, 2 and 1, 3, the batch over the rest. Fault: half of the
    ranks make the two groups in the other order, so that group names stand for other members."""
    rank = dist.get_rank()
    lists = [[0, 2], [1, 3]]
    upside_down = setup.is_faulty and rank in second_half(setup)
    made = {tuple(ranks): dist.new_group(ranks) for ranks in lists[:: -1 if upside_down else 1]}
    group = made[tuple(lists[rank % 2])]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = whole(setup, Cut(group))
    trained = Trained(model, cuts=cut_from(whole(setup), model, rank // 2, 2))

    def meet(step: int) -> None:
        average_gradients(model.parameters(), pairs[rank // 2], 2)

    trained.group = group
    return train(
        trained,
        sgd(model),
        lambda step: one_step(setup, model, step, rank % 2, 2),
        before_update=meet,
    )


def second_half(setup: Setup) -> tuple[int, int]:
    """The ranks that list the groups the other way round: with any others the job would hang."""
    return (2, 3) if setup.seed % 2 == 0 else (0, 1)


def summed_with_its_own(setup: Setup, trained: Trained) -> str:
    """A group's all-reduce must sum over the members that this rank listed, and gradients be those
    of one process."""
    rank = dist.get_rank()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=trained.group)
    wrong = [] if float(total) == 2 + 2 * (rank % 2) else [f"rank {rank} summed {float(total)}"]
    names = truth.wrong_gradients(setup, truth.whole_gradients(trained, trained.group))
    return truth.said("not the sum over its own group", truth.united(wrong)) or truth.said(
        "gradients unlike one process", names
    )
