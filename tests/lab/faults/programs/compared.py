"""Parallel programs whose mistakes only a run of one process shows, as ranks may agree: wrong sums,
factors, denominators and places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.lab.faults import truth
from tests.lab.faults.model import batch, cut_from, loss_of, whole
from tests.lab.faults.parallel import Cut, Enter, Group, Leave, SequenceParts, average_gradients
from tests.lab.faults.programs import ports
from tests.lab.faults.programs.data import sgd, step_of
from tests.lab.faults.programs.experts import (
    CutMixing,
    Mixing,
    SoftMixing,
    SplitMixing,
    SplitMixture,
    whole_step,
)
from tests.lab.faults.programs.pipeline import MICRO_BATCHES, stage
from tests.lab.faults.programs.tensor import cut_by_hand, one_step
from tests.lab.faults.setup import Setup, Shape, Trained, train


def alone(setup: Setup) -> Trained:
    """The model in one process."""
    model = whole(setup)
    return train(Trained(model), sgd(model), lambda step: whole_step(setup, model, step))


class Averaged(torch.autograd.Function):
    """Out of a split region: averaged over the group where a sum belongs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return Leave.forward(ctx, x, group) / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class AveragedBackward(torch.autograd.Function):
    """Into a split region: gradients averaged over the group where a sum belongs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return Enter.forward(ctx, x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Enter.backward(ctx, gradient)[0] / dist.get_world_size(ctx.group), None


class SummedTwice(torch.autograd.Function):
    """Out of a split region: gradients, which are complete, summed over the group again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return Leave.forward(ctx, x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Enter.backward(ctx, gradient)


class Wrapped(nn.Module):
    """A split layer with other collectives around its product."""

    def __init__(self, layer: nn.Module, enter: Any, leave: Any) -> None:
        super().__init__()
        self.weight, self._group = layer.weight, layer._group
        self._enter, self._leave = enter, leave

    def forward(self, x: Tensor) -> Tensor:
        x = x if self._enter is None else self._enter.apply(x, self._group)
        made = F.linear(x, self.weight)
        return made if self._leave is None else self._leave.apply(made, self._group)


def by_hand(path: str, enter: Any, leave: Any) -> Callable[[Setup], Trained]:
    """Return a program of tensor parallelism by hand. Fault: other collectives around one layer."""

    def program(setup: Setup) -> Trained:
        trained = cut_by_hand(setup, dist.group.WORLD)
        if setup.is_faulty:
            parent, _, name = path.rpartition(".")
            owner = trained.model.layers[str(setup.layer)].get_submodule(parent)
            setattr(owner, name, Wrapped(getattr(owner, name), enter, leave))
        model = trained.model
        return train(trained, sgd(model), lambda step: one_step(setup, model, step))

    return program


averaged_reduction = by_hand("attention.o_proj", None, Averaged)
averaged_backward = by_hand("feed_forward.up_proj", AveragedBackward, None)
unreduced_backward = by_hand("feed_forward.up_proj", None, None)
summed_twice = by_hand("feed_forward.down_proj", None, SummedTwice)


class Vocabulary(nn.Module):
    """An embedding whose rows are split over a group. Fault: the rows begin one too late."""

    def __init__(self, table: Tensor, group: Group, is_late: bool) -> None:
        super().__init__()
        place, places = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(table.detach().chunk(places)[place].clone())
        self._first = sum(len(each) for each in table.chunk(places)[:place])
        self._first += int(is_late and place > 0)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        place = x - self._first
        is_mine = (place >= 0) & (place < len(self.weight))
        made = F.embedding(place.clamp(0, len(self.weight) - 1), self.weight)
        return Leave.apply(made * is_mine[..., None], self._group)


def split_vocabulary(setup: Setup) -> Trained:
    """Tensor parallelism by hand, the embedding split too."""
    trained = cut_by_hand(setup, dist.group.WORLD)
    model = trained.model
    model.embed = Vocabulary(model.embed.weight, dist.group.WORLD, setup.is_faulty)
    trained.cuts = {**trained.cuts, "embed.weight": 0}
    return train(trained, sgd(model), lambda step: one_step(setup, model, step))


def fused(setup: Setup) -> Trained:
    """Heads of a fused projection split over ranks. Fault: its weight is cut as if it were one, so
    that the first rank has queries alone."""
    group = dist.group.WORLD
    model, source = ports.decoder(setup, Cut(group)), ports.decoder(setup)
    place = dist.get_rank()
    cuts = cut_from(source, model, place, setup.ranks)
    for number, layer in model.layers.items():
        table = source.layers[number].attention.qkv_proj.weight.detach()
        if not (setup.is_faulty and int(number) == setup.layer):
            sizes = [len(table) // 2, len(table) // 4, len(table) // 4]
            mine = [part.chunk(setup.ranks)[place] for part in table.split(sizes)]
            layer.attention.qkv_proj.weight.data.copy_(torch.cat(mine))
    trained = Trained(model, cuts=cuts)

    def one(step: int) -> Tensor:
        tokens, targets = ports.padded(setup, step)
        loss = ports.mean_loss(model(tokens), targets)
        loss.backward()
        return loss

    return train(trained, sgd(model), one)


def fused_right(setup: Setup, trained: Trained) -> str:
    """Gradients of what is not fused must be those of one process."""
    theirs = ports.right(setup).gradients
    ours = truth.whole_gradients(trained)
    kept = {n: g for n, g in ours.items() if "qkv_proj" not in n}
    wrong = truth.wrong_values(setup, kept, theirs)
    return truth.said("gradients unlike one process", wrong)


def ddp_summed(setup: Setup) -> Trained:
    """Replicas. Fault: gradients are added over ranks and not averaged."""
    model = whole(setup)
    wrapped = DDP(model)

    def summed(_, bucket):  # annotations as text are refused
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    if setup.is_faulty:
        wrapped.register_comm_hook(None, summed)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def fsdp2_summed(setup: Setup) -> Trained:
    """Shards. Fault: gradients are added over ranks and not averaged."""
    mesh = init_device_mesh("cpu", (setup.ranks,), mesh_dim_names=("dp",))
    model = whole(setup)
    for each in (*model.layers.values(), model):
        fully_shard(each, mesh=mesh)
        if setup.is_faulty:
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)  # gloo has no factor of its own
    return train(Trained(model), sgd(model), lambda step: step_of(setup, model, step))


def own_tokens(setup: Setup) -> Trained:
    """Replicas on rows with padding. Fault: every rank takes the mean over its own tokens."""
    model = ports.decoder(setup)
    wrapped = DDP(model)

    def one(step: int) -> Tensor:
        tokens, targets = ports.padded(setup, step, dist.get_rank(), setup.ranks)
        loss = ports.mean_loss(wrapped(tokens), targets)
        if not setup.is_faulty:
            all_ = (ports.padded(setup, step)[1] != ports.PADDED).sum()
            loss = loss * ((targets != ports.PADDED).sum() / all_ * setup.ranks)
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)


class ZigZag(SequenceParts):
    """Attention over a sequence of which each rank has one chunk from the begin and one from the
    end; keys and values are put in order once they are gathered."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._ranks = dist.get_world_size(group)

    def exchange(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.cat(
            [zigzag(k.shape[2] * self._ranks, r, self._ranks) for r in range(self._ranks)]
        )
        back = order.argsort()
        k, v = super().exchange(k, v)
        return k[:, :, back], v[:, :, back]


def zigzag(time: int, rank: int, ranks: int) -> Tensor:
    """Return the positions that a rank has of `time` tokens."""
    chunks = torch.arange(time).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def split_sequence(fault: str, is_zigzag: bool = False) -> Callable[[Setup], Trained]:
    """Return a program of context parallelism: neighbours on one rank, or a chunk from the begin
    and one from the end.

    Args:
        fault: "loss": it is multiplied by the ranks. "zero": positions begin at 0 on every rank.
            "neighbours": they are those of neighbours. "summed": gradients are not averaged.
    """

    def program(setup: Setup) -> Trained:
        rank, group, ranks = dist.get_rank(), dist.group.WORLD, setup.ranks
        model = whole(setup, (ZigZag if is_zigzag else SequenceParts)(group))
        width = setup.shape.context // ranks
        neighbours = torch.arange(rank * width, (rank + 1) * width)
        mine = zigzag(setup.shape.context, rank, ranks) if is_zigzag else neighbours
        active = fault if setup.is_faulty else ""
        told = {"zero": torch.arange(width), "neighbours": neighbours}.get(active, mine)
        model.positions.register_forward_pre_hook(lambda _, given: (told,))
        for block in model.layers.values():
            block.attention.places = mine

        def one(step: int) -> Tensor:
            tokens, targets = (half[:, mine] for half in batch(setup, step))
            loss = loss_of(model(tokens), targets) * (ranks if active == "loss" else 1)
            loss.backward()
            return loss

        divisor = 1.0 if active == "summed" else ranks
        return train(
            Trained(model),
            sgd(model),
            one,
            before_update=lambda step: average_gradients(model.parameters(), group, divisor),
        )

    return program


class NamedMixture(SplitMixture):
    """Experts split over a group, each under the number that it has in the whole model."""

    def __init__(self, shape: Shape, group: Group) -> None:
        super().__init__(shape, ports.Parts(), group)
        first = dist.get_rank(group) * len(self.experts)
        self.experts = nn.ModuleDict({str(first + n): e for n, e in enumerate(self.experts)})


class NamedMixing(SplitMixing):
    """Blocks with such a mixture."""

    def feed_forward(self, shape: Shape) -> nn.Module:
        return NamedMixture(shape, self._group)


def named_experts(setup: Setup) -> Trained:
    """Experts split over ranks that also split the batch. Fault: gradients of experts, which are
    the sum over all tokens, are not divided as those of all others are."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = whole(setup, NamedMixing(group))
    cut_from(whole(setup, Mixing()), model, rank, setup.ranks)
    shared = [p for n, p in model.named_parameters() if ".experts." not in n]
    own = [p for n, p in model.named_parameters() if ".experts." in n]

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, rank, setup.ranks)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    def meet(step: int) -> None:
        average_gradients(shared, group, setup.ranks)
        for parameter in own:
            if parameter.grad is not None and not setup.is_faulty:
                parameter.grad /= setup.ranks

    return train(Trained(model), sgd(model), one, before_update=meet)


def experts_alone(setup: Setup) -> Trained:
    """The mixture in one process."""
    model = whole(setup, Mixing())
    return train(Trained(model), sgd(model), lambda step: whole_step(setup, model, step))


def experts_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process."""
    theirs = truth.reference_gradients(setup, whole(setup, Mixing()))
    wrong = truth.wrong_values(setup, trained.gradients, theirs)
    return truth.said("gradients unlike one process", wrong)


def with_balance(setup: Setup, model: nn.Module, times: float) -> Trained:
    """Train a mixture whose routers are also to use all experts alike."""
    routed: list[Tensor] = []
    for block in model.layers.values():
        block.feed_forward.router.register_forward_hook(lambda _, given, made: routed.append(made))

    def one(step: int) -> Tensor:
        routed.clear()
        tokens, targets = batch(setup, step)
        loss = loss_of(model(tokens), targets)
        shares = [F.softmax(made.float(), -1).flatten(0, -2).mean(0) for made in routed]
        loss = loss + 2.0 * times * sum(share.square().sum() for share in shares)
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)


def balance_alone(setup: Setup) -> Trained:
    """One process with that loss."""
    return with_balance(setup, whole(setup, SoftMixing()), 1.0)


def balanced(setup: Setup) -> Trained:
    """Experts cut by hand, routers that all ranks hold. Fault: the loss that balances experts is
    counted once a rank."""
    model = whole(setup, CutMixing(dist.group.WORLD))
    cuts = cut_from(whole(setup, SoftMixing()), model, dist.get_rank(), setup.ranks)
    trained = with_balance(setup, model, float(setup.ranks) if setup.is_faulty else 1.0)
    trained.cuts = cuts
    return trained


def balance_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process."""
    theirs = balance_alone(setup).gradients
    wrong = truth.wrong_gradients(setup, truth.whole_gradients(trained), theirs)
    return truth.said("gradients unlike one process", wrong)


def staged(setup: Setup, model: nn.Module, **how: bool) -> Trained:
    """Train stages of torch's own pipelining."""
    rank, places = dist.get_rank(), setup.ranks
    part = PipelineStage(model, rank, places, torch.device("cpu"))
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=loss_of, **how)

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step)
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if rank == places - 1 else {}
        schedule.step(*([tokens] if rank == 0 else []), **given)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return train(Trained(model), sgd(model), one)


def unscaled_stages(setup: Setup) -> Trained:
    """Fault: gradients of micro-batches are added, not averaged."""
    model = stage(setup, dist.get_rank(), setup.ranks)
    return staged(setup, model, scale_grads=not setup.is_faulty)


def wrong_layer(setup: Setup) -> Trained:
    """Fault: the last stage was filled with the layer before the one it has."""
    model = stage(setup, dist.get_rank(), setup.ranks)
    if setup.is_faulty and dist.get_rank() == setup.ranks - 1:
        number = max(map(int, model.layers))
        source = whole(setup).layers[str(number - 1)]
        model.layers[str(number)].load_state_dict(source.state_dict())
    return staged(setup, model)
