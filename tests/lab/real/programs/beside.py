"""Programs whose ranks agree, and are wrong: only a run of one process shows it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.lab.faults import truth
from tests.lab.faults.model import Parts, batch, loss_of, whole
from tests.lab.faults.parallel import Exchange, average_gradients
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.pipeline import MICRO_BATCHES, stage, stages_right
from tests.lab.faults.programs.ports import PADDED, padded
from tests.lab.faults.setup import Setup, Shape, Trained, train

pipeline_right = stages_right


def llama(setup: Setup) -> Any:
    """A tiny Llama, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(60 + setup.seed)
    shape = setup.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).train()


def tokens_counted(setup: Setup, part: int = 0, parts: int = 1) -> Trained:
    """The loss of transformers with a number of tokens. Bug: with several ranks it is the number of
    this rank's own; the twin has that of all, and its loss undoes the average over ranks."""
    model = llama(setup)
    wrapped = DDP(model) if parts > 1 else model

    def one(step: int) -> Tensor:
        tokens, labels = padded(setup, step, part, parts)
        # the library shifts labels itself, and leaves the first one out
        labels = torch.cat([torch.full_like(labels[:, :1], PADDED), labels[:, :-1]], 1)
        count, times = (labels[:, 1:] != PADDED).sum(), 1
        if parts > 1 and not setup.is_faulty:
            dist.all_reduce(count)
            times = parts
        loss = wrapped(input_ids=tokens, labels=labels, num_items_in_batch=count).loss * times
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)


def tokens_averaged(setup: Setup) -> Trained:
    return tokens_counted(setup, dist.get_rank(), setup.ranks)


def tokens_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process."""
    theirs = tokens_counted(setup).gradients
    wrong = truth.wrong_gradients(setup, trained.gradients, theirs)
    return truth.said("gradients unlike one process", wrong)


def staged(setup: Setup, loss_fn: Any, chunks: int, *, is_scaling: bool) -> Trained:
    """Stages by torch; the batch comes in so many parts, each of them a call of the schedule."""
    rank, last = dist.get_rank(), setup.ranks - 1
    model = stage(setup, rank, setup.ranks)
    part = PipelineStage(model, rank, setup.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(part, MICRO_BATCHES, loss_fn=loss_fn, scale_grads=is_scaling)

    def one(step: int) -> Tensor:
        losses: list[Tensor] = []
        for tokens, targets in zip(*(half.chunk(chunks) for half in batch(setup, step))):
            given = {"target": targets, "losses": losses} if rank == last else {}
            schedule.step(*([tokens] if rank == 0 else []), **given)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return train(Trained(model), sgd(model), one)


def rescaled_twice(setup: Setup) -> Trained:
    """A pipeline that accumulates over two calls. Bug: the schedule divides all gradients by its
    micro-batches at the end of every call, those of the call before too; the twin divides the
    losses."""
    parts = 2 if setup.is_faulty else 2 * MICRO_BATCHES

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) / parts

    return staged(setup, loss_fn, 2, is_scaling=setup.is_faulty)


def never_divided(setup: Setup) -> Trained:
    """A pipeline whose loss is a sum over tokens. Bug: it is divided by their number behind
    backward, for the log alone."""
    total = 1 if setup.is_faulty else setup.shape.batch * setup.shape.context

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / total

    return staged(setup, loss_fn, 1, is_scaling=False)


class Grouped(nn.Module):
    """Experts in two tensors: [tokens, hidden], sorted by expert, through the expert of each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(shape.experts, shape.hidden, 2 * shape.hidden))
        self.w2 = nn.Parameter(torch.empty(shape.experts, 2 * shape.hidden, shape.hidden))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        parts = rows.split(counts)
        return torch.cat([F.gelu(part @ a) @ b for part, a, b in zip(parts, w1, w2)])


class GroupedMixture(nn.Module):
    """Each token to the best of all experts; with a group they are split over its ranks."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Grouped(shape)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = F.softmax(self.router(rows), -1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        through = self._here if self._group is None else self._there
        mixed = through(rows[order], counts)[order.argsort()]
        return (mixed * weights[:, None]).view_as(x)

    def _here(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.experts(rows, counts.tolist())

    def _there(self, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = dist.get_world_size(self._group)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        given, taken = (each.view(ranks, -1).sum(1).tolist() for each in (counts, arriving))
        received = Exchange.apply(rows, given, taken, self._group)
        expert = torch.arange(len(counts) // ranks).repeat(ranks).repeat_interleave(arriving)
        order = expert.argsort(stable=True)
        made = self.experts(received[order], arriving.view(ranks, -1).sum(0).tolist())
        return Exchange.apply(made[order.argsort()], taken, given, self._group)


class GroupedParts(Parts):
    """Such a mixture in place of every feed-forward."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def feed_forward(self, shape: Shape) -> nn.Module:
        return GroupedMixture(shape, self._group)


def grouped_experts(setup: Setup) -> Trained:
    """Expert weights are DTensors over ranks that also split the batch. Bug: their gradients, sums
    over the tokens of all ranks, are not divided as all others are."""
    group = dist.group.WORLD
    model = whole(setup, GroupedParts(group))
    mesh = init_device_mesh("cpu", (setup.ranks,), mesh_dim_names=("ep",))
    own = []
    for block in model.layers.values():
        held = block.feed_forward.experts
        for name in ("w1", "w2"):
            mine = getattr(held, name).detach().chunk(setup.ranks)[dist.get_rank()].clone()
            setattr(held, name, nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)])))
            own.append(getattr(held, name))
    shared = [p for n, p in model.named_parameters() if ".experts." not in n]

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step, dist.get_rank(), setup.ranks)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    def meet(step: int) -> None:
        average_gradients(shared, group, setup.ranks)
        for parameter in own if not setup.is_faulty else ():
            truth.local(parameter.grad).div_(setup.ranks)

    return train(Trained(model), sgd(model), one, before_update=meet)


def grouped_alone(setup: Setup) -> Trained:
    """The same in one process."""
    model = whole(setup, GroupedParts())

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)


def grouped_right(setup: Setup, trained: Trained) -> str:
    """Gradients must be those of one process."""
    theirs = truth.reference_gradients(setup, whole(setup, GroupedParts()))
    wrong = truth.wrong_gradients(setup, truth.whole_gradients(trained), theirs)
    return truth.said("gradients unlike one process", wrong)
