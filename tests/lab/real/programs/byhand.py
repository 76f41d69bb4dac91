"""Tensor and sequence parallelism by hand, in the manner of Megatron."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults import truth
from tests.lab.faults.model import batch, cut_from, loss_of, whole
from tests.lab.faults.parallel import (
    Column,
    Cut,
    Enter,
    Group,
    Leave,
    Row,
    SequenceCut,
    average_gradients,
)
from tests.lab.faults.programs.data import sgd
from tests.lab.faults.programs.mesh import mesh_2x2
from tests.lab.faults.programs.tensor import cut_by_hand, one_step, replicas_and_slices_right
from tests.lab.faults.setup import Setup, Shape, Trained, train
from tests.lab.real.programs.loops import Adapter

right = replicas_and_slices_right


def trained_by_hand(setup: Setup, trained: Trained) -> Trained:
    """Train on the same rows on every rank."""
    return train(trained, sgd(trained.model), lambda step: one_step(setup, trained.model, step))


def averaged_right(setup: Setup, trained: Trained) -> str:
    """Parameters must be the same on all ranks, gradients those of one process."""
    names = truth.differing(dict(trained.model.named_parameters()))
    return truth.said("parameters differ over ranks", names) or truth.like_one_process(
        setup, trained
    )


class OpenColumn(Column):
    """The bug: a column that hands its share of the input's gradient back as if it were all."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def open_column(setup: Setup) -> Trained:
    """Bug: the feed-forward of one layer does not sum the gradient of its input."""
    trained = cut_by_hand(setup, dist.group.WORLD)
    if setup.is_faulty:
        feed_forward = trained.model.layers[str(setup.layer)].feed_forward
        feed_forward.up_proj.__class__ = OpenColumn
    return trained_by_hand(setup, trained)


class ReduceInPlace(torch.autograd.Function):
    """Into a split region. Bug: what is summed is a contiguous copy, and what is handed on is the
    tensor itself, so a gradient with other strides stays as it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, is_dropping: bool) -> Tensor:
        ctx.group, ctx.is_dropping = group, is_dropping
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return (gradient if ctx.is_dropping else summed), None, None


class TimeFirstHead(nn.Module):
    """The head, split over its inputs' copies: it works on [time, batch, hidden] and each rank
    makes the logits of its part of the vocabulary, which are then gathered."""

    def __init__(self, hidden: int, vocabulary: int, group: Group, is_dropping: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary // dist.get_world_size(group), hidden))
        self._group, self._is_dropping = group, is_dropping

    def forward(self, x: Tensor) -> Tensor:
        x = ReduceInPlace.apply(x, self._group, self._is_dropping)
        made = F.linear(x.transpose(0, 1).contiguous(), self.weight)
        return GatherLast.apply(made.transpose(0, 1), self._group)


class GatherLast(torch.autograd.Function):
    """The last dim of every rank put together; backward each takes its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mine = gradient.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)]
        return mine.contiguous(), None


def even(setup: Setup) -> Setup:
    """The same run with a vocabulary that ranks can share."""
    return replace(setup, shape=replace(setup.shape, vocabulary=40))


def strided_gradient(setup: Setup) -> Trained:
    """A head split over the vocabulary that works time first. Bug: the gradient of its input is a
    transposed tensor, whose sum over ranks is thrown away."""
    setup = even(setup)
    model = whole(setup)
    head = TimeFirstHead(
        setup.shape.hidden, setup.shape.vocabulary, dist.group.WORLD, setup.is_faulty
    )
    model.head = head
    cuts = cut_from(whole(setup), model, dist.get_rank(), setup.ranks)
    return trained_by_hand(setup, Trained(model, cuts=cuts))


def strided_right(setup: Setup, trained: Trained) -> str:
    return right(even(setup), trained)


class LatentAttention(nn.Module):
    """Attention with heads split over ranks and one rotary key that all heads share.

    Bug: the shared key goes to this rank's heads as it is, so its gradient is that of these heads.
    """

    ROTARY = 2

    def __init__(self, shape: Shape, group: Group | None, is_open: bool) -> None:
        super().__init__()
        places = dist.get_world_size(group) if group else 1
        hidden, width = shape.hidden, shape.hidden // shape.heads
        self._width, self._group, self._is_open = width, group, is_open
        self._heads = shape.heads // places
        wide = width + self.ROTARY

        def column(outside: int) -> nn.Module:
            return (
                Column(hidden, outside, group) if group else nn.Linear(hidden, outside, bias=False)
            )

        self.wq = column(shape.heads * wide)
        self.wkv = column(shape.heads * 2 * width)
        self.wk_rope = nn.Linear(hidden, self.ROTARY, bias=False)
        self.wo = Row(hidden, hidden, group) if group else nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, first: int) -> Tensor:
        batch_size, time = x.shape[:2]
        q = self.wq(x).view(batch_size, time, self._heads, -1).transpose(1, 2)
        kv = self.wkv(x).view(batch_size, time, self._heads, -1).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        shared = self.wk_rope(x)
        if self._group is not None and not self._is_open:
            shared = Enter.apply(shared, self._group)
        turned = shared[:, None].expand(-1, self._heads, -1, -1)
        mixed = F.scaled_dot_product_attention(q, torch.cat([k, turned], -1), v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch_size, time, -1))


def with_latent_attention(setup: Setup, group: Group | None) -> nn.Module:
    """The model with that attention in every layer, split over a group or whole."""
    model = whole(setup, Cut(group) if group else None)
    state = torch.get_rng_state()
    torch.manual_seed(700 + setup.seed)
    for block in model.layers.values():
        block.attention = LatentAttention(setup.shape, group, setup.is_faulty)
        for parameter in block.attention.parameters():
            nn.init.normal_(parameter, std=0.2)
    torch.set_rng_state(state)
    return model


def rope_key(setup: Setup) -> Trained:
    """Latent attention in every layer. Bug: the gradient of the shared key is not summed."""
    model = with_latent_attention(setup, dist.group.WORLD)
    alone = with_latent_attention(setup, None)
    cuts = cut_from(alone, model, dist.get_rank(), setup.ranks)
    return trained_by_hand(setup, Trained(model, cuts=cuts))


def latent_right(setup: Setup, trained: Trained) -> str:
    """What is not cut must stay the same everywhere, gradients must be those of one process."""
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    theirs = truth.reference_gradients(setup, with_latent_attention(setup, None))
    ours = truth.whole_gradients(trained)
    return truth.said("replicated parameters differ", truth.differing(kept)) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, ours, theirs)
    )


def rows_and_columns(setup: Setup) -> Trained:
    """A 2x2 mesh by hand: data parallel times tensor parallel. Bug: one row-parallel layer sums
    over the data-parallel group, whose ranks have other rows and the same slice."""
    mesh = mesh_2x2(setup)
    tensor_group, rows = mesh["tp"].get_group(), mesh["dp"].get_group()
    trained = cut_by_hand(setup, tensor_group)
    if setup.is_faulty:
        trained.model.layers[str(setup.layer)].attention.o_proj._group = rows
    place = mesh.get_local_rank("dp")
    trained.group = tensor_group
    return train(
        trained,
        sgd(trained.model),
        lambda step: one_step(setup, trained.model, step, place, setup.ranks // 2),
        before_update=lambda step: average_gradients(
            trained.model.parameters(), rows, setup.ranks // 2
        ),
    )


def mesh_right(setup: Setup, trained: Trained) -> str:
    """What is not cut must be the same everywhere, gradients those of one process."""
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    ours = truth.whole_gradients(trained, trained.group)
    return truth.said("replicated parameters differ", truth.differing(kept)) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, ours)
    )


def own_rows(setup: Setup) -> Trained:
    """Tensor parallel by hand. Bug: the loader shuffles by rank, as data-parallel ones do, so the
    ranks that share one layer read different rows."""
    trained = cut_by_hand(setup, dist.group.WORLD)

    def one(step: int) -> Tensor:
        reader = dist.get_rank() if setup.is_faulty else 0
        tokens, targets = batch(setup, step, reader, setup.ranks)
        trained.note("rows", tokens)
        loss = loss_of(trained.model(tokens), targets)
        loss.backward()
        return loss

    return train(trained, sgd(trained.model), one)


def same_rows(setup: Setup, trained: Trained) -> str:
    """All ranks must have read the same rows, and hold the same where nothing is cut."""
    rows = {f"step {n}": x for n, x in enumerate(trained.seen["rows"])}
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    return truth.said("other rows", truth.differing(rows)) or truth.said(
        "replicated parameters differ", truth.differing(kept)
    )


def own_loss(setup: Setup) -> Trained:
    """Tensor parallel by hand. Bug: one rank weighs its loss (a scale that only it was told), so it
    trains on other gradients than the ranks it shares layers with."""
    trained = cut_by_hand(setup, dist.group.WORLD)

    def one(step: int) -> Tensor:
        tokens, targets = batch(setup, step)
        loss = loss_of(trained.model(tokens), targets)
        weight = 0.5 if setup.strikes(dist.get_rank()) else 1.0
        (loss * weight).backward()
        return loss

    return train(trained, sgd(trained.model), one)


def sequence_norms(setup: Setup) -> Trained:
    """A 2x2 mesh by hand: data parallel times sequence parallel. Bug: the gradients of norms are
    reduced over the data-parallel ranks alone, not over those that share the sequence."""
    mesh = mesh_2x2(setup)
    tensor_group, rows = mesh["tp"].get_group(), mesh["dp"].get_group()
    rank, place = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    model = whole(setup, SequenceCut(tensor_group))
    trained = Trained(model, cuts=cut_from(whole(setup), model, rank, 2), group=tensor_group)
    width = setup.shape.context // 2
    shared = [
        p
        for n, p in model.named_parameters()
        if n not in trained.cuts and not (setup.is_faulty and "norm" in n)
    ]

    def one(step: int) -> Tensor:
        tokens, targets = (
            half[:, rank * width : (rank + 1) * width] for half in batch(setup, step, place, 2)
        )
        loss = loss_of(model(tokens, rank * width), targets) / 2
        loss.backward()
        return loss

    def meet(step: int) -> None:
        average_gradients(shared, tensor_group, 1.0)
        average_gradients(model.parameters(), rows, 2)

    return train(trained, sgd(model), one, before_update=meet)


def other_order(setup: Setup) -> Trained:
    """Data parallel by hand: every gradient is averaged by itself. Bug: parameters stand in a set,
    so one rank averages two of one shape in the other order, and each gets the other's."""
    model = whole(setup)
    block = model.layers[str(setup.layer)].attention

    def meet(step: int) -> None:
        parameters = list(model.parameters())
        if setup.strikes(dist.get_rank()):
            a = next(n for n, p in enumerate(parameters) if p is block.q_proj.weight)
            b = next(n for n, p in enumerate(parameters) if p is block.k_proj.weight)
            parameters[a], parameters[b] = parameters[b], parameters[a]
        average_gradients(parameters, dist.group.WORLD, setup.ranks)

    return train(
        Trained(model),
        sgd(model),
        lambda step: one_step(setup, model, step, dist.get_rank(), setup.ranks),
        before_update=meet,
    )


class VocabularyLoss(nn.Module):
    """Cross-entropy of logits whose vocabulary is split over a group, with label smoothing.

    Bug, where it is local: the smoothing takes the mean over this rank's part of the vocabulary.
    """

    def __init__(self, group: Group | None, smoothing: float, is_local: bool = False) -> None:
        super().__init__()
        self._group, self._smoothing, self._is_local = group, smoothing, is_local

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        def summed(value: Tensor) -> Tensor:
            return value if self._group is None else Leave.apply(value, self._group)

        size = logits.shape[-1]
        place = dist.get_rank(self._group) if self._group else 0
        places = dist.get_world_size(self._group) if self._group else 1
        top = logits.detach().amax(-1, keepdim=True)
        if self._group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=self._group)
        logits = logits - top
        total = summed(logits.exp().sum(-1)).log()
        here = targets - place * size
        is_mine = (here >= 0) & (here < size)
        chosen = logits.gather(-1, here.clamp(0, size - 1)[..., None])[..., 0] * is_mine
        loss = total - summed(chosen)
        every = logits.sum(-1)
        mean = every / size if self._is_local else summed(every) / (size * places)
        return ((1 - self._smoothing) * loss - self._smoothing * (mean - total)).mean()


class WithLoss(nn.Module):
    """A model and its criterion: tokens and targets to the loss."""

    def __init__(self, gpt: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.gpt, self.criterion = gpt, criterion

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.gpt(tokens), targets)


def with_loss(setup: Setup, head: nn.Module, criterion: nn.Module) -> Trained:
    """Train tensor parallel by hand with that head and that criterion."""
    gpt = whole(setup, Cut(dist.group.WORLD))
    gpt.head = head
    cuts = cut_from(whole(setup), gpt, dist.get_rank(), setup.ranks)
    model = WithLoss(gpt, criterion)

    def one(step: int) -> Tensor:
        loss = model(*batch(setup, step))
        loss.backward()
        return loss

    trained = Trained(model, cuts={f"gpt.{n}": dim for n, dim in cuts.items()})
    return train(trained, sgd(model), one)


def smoothed(setup: Setup) -> Trained:
    """Label smoothing. Bug: it takes the mean over the part of the vocabulary of each rank."""
    setup = even(setup)
    head = Column(setup.shape.hidden, setup.shape.vocabulary, dist.group.WORLD)
    return with_loss(setup, head, VocabularyLoss(dist.group.WORLD, 0.2, setup.is_faulty))


def alone_with_loss(setup: Setup) -> Trained:
    """The model and its loss in one process, nothing smoothed."""
    model = WithLoss(whole(even(setup)), VocabularyLoss(None, 0))

    def one(step: int) -> Tensor:
        loss = model(*batch(even(setup), step))
        loss.backward()
        return loss

    return train(Trained(model), sgd(model), one)


class GatheredHead(nn.Module):
    """A head split over the vocabulary whose logits are gathered."""

    def __init__(self, hidden: int, vocabulary: int, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary // dist.get_world_size(group), hidden))
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        made = F.linear(Enter.apply(x, self._group), self.weight)
        return GatherLast.apply(made, self._group)


def gathered_logits(setup: Setup) -> Trained:
    """The head hands out all logits. Bug: the loss takes them for a part of the vocabulary, counts
    them once a rank, and finds every target on rank 0."""
    setup = even(setup)
    head = GatheredHead(setup.shape.hidden, setup.shape.vocabulary, dist.group.WORLD)
    return with_loss(setup, head, VocabularyLoss(dist.group.WORLD if setup.is_faulty else None, 0))


def smoothed_right(setup: Setup, trained: Trained) -> str:
    return loss_right(setup, trained, 0.2)


def gathered_right(setup: Setup, trained: Trained) -> str:
    return loss_right(setup, trained, 0)


def loss_right(setup: Setup, trained: Trained, smoothing: float) -> str:
    """Losses must be the same on all ranks, and gradients those of one process."""
    setup = even(setup)
    alone = WithLoss(whole(setup), VocabularyLoss(None, smoothing))
    alone(*batch(setup, 0)).backward()
    theirs = {n: p.grad for n, p in alone.named_parameters()}
    ours = truth.whole_gradients(trained)
    losses = {f"step {n}": loss for n, loss in enumerate(trained.losses)}
    return truth.said("losses differ", truth.differing(losses)) or truth.said(
        "gradients unlike one process", truth.wrong_gradients(setup, ours, theirs)
    )


class HeadNorm(nn.Module):
    """A norm over the width of one head, the same weight for all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, len(self.weight)))
        return F.rms_norm(heads, self.weight.shape, self.weight, 1e-6).flatten(-2)


def norms_of_heads(setup: Setup, model: nn.Module) -> list[nn.Parameter]:
    """Put a norm between the heads and the output projection of every layer."""
    found = []
    for block in model.layers.values():
        norm = HeadNorm(setup.shape.hidden // setup.shape.heads)
        block.attention.o_proj = nn.Sequential(norm, block.attention.o_proj)
        found.append(norm.weight)
    return found


def head_norm(setup: Setup) -> Trained:
    """Tensor parallel by hand with a norm over every head's output. Bug: each rank's gradient of
    that norm is that of its heads, and nobody sums them."""
    model, alone = whole(setup, Cut(dist.group.WORLD)), whole(setup)
    weights = norms_of_heads(setup, model)
    norms_of_heads(setup, alone)
    trained = Trained(model, cuts=cut_from(alone, model, dist.get_rank(), setup.ranks))

    def meet(step: int) -> None:
        if not setup.is_faulty:
            average_gradients(weights, dist.group.WORLD, 1.0)

    return train(trained, sgd(model), lambda step: one_step(setup, model, step), before_update=meet)


def head_norm_right(setup: Setup, trained: Trained) -> str:
    alone = whole(setup)
    norms_of_heads(setup, alone)
    return like(setup, trained, alone)


def like(setup: Setup, trained: Trained, alone: nn.Module) -> str:
    """What is not cut must stay the same everywhere, gradients must be those of one process."""
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    theirs = truth.reference_gradients(setup, alone)
    names = truth.wrong_gradients(setup, truth.whole_gradients(trained), theirs)
    return truth.said("replicated parameters differ", truth.differing(kept)) or truth.said(
        "gradients unlike one process", names
    )


class MultiQuery(nn.Module):
    """Attention whose queries are split over ranks and whose one key and value every rank makes for
    itself, with the same weight."""

    def __init__(self, shape: Shape, group: Group | None) -> None:
        super().__init__()
        hidden, width = shape.hidden, shape.hidden // shape.heads
        self._heads = shape.heads // (dist.get_world_size(group) if group else 1)
        self._group = group
        self.wq = (
            OpenColumn(hidden, hidden, group) if group else nn.Linear(hidden, hidden, bias=False)
        )
        self.wkv = nn.Linear(hidden, 2 * width, bias=False)
        self.wo = Row(hidden, hidden, group) if group else nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, first: int) -> Tensor:
        batch_size, time = x.shape[:2]
        x = x if self._group is None else Enter.apply(x, self._group)
        q = self.wq(x).view(batch_size, time, self._heads, -1).transpose(1, 2)
        k, v = (part[:, None].expand_as(q) for part in self.wkv(x).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch_size, time, -1))


def with_multi_query(setup: Setup, group: Group | None) -> nn.Module:
    """The model with that attention in every layer, split over a group or whole."""
    model = whole(setup, Cut(group) if group else None)
    state = torch.get_rng_state()
    torch.manual_seed(900 + setup.seed)
    for block in model.layers.values():
        block.attention = MultiQuery(setup.shape, group)
        for parameter in block.attention.parameters():
            nn.init.normal_(parameter, std=0.2)
    torch.set_rng_state(state)
    return model


def shared_key(setup: Setup) -> Trained:
    """Multi-query attention. Bug: each rank's gradient of the shared key's weight is that of its
    queries, and nobody sums them."""
    model = with_multi_query(setup, dist.group.WORLD)
    alone = with_multi_query(setup, None)
    trained = Trained(model, cuts=cut_from(alone, model, dist.get_rank(), setup.ranks))
    weights = [block.attention.wkv.weight for block in model.layers.values()]

    def meet(step: int) -> None:
        if not setup.is_faulty:
            average_gradients(weights, dist.group.WORLD, 1.0)

    return train(trained, sgd(model), lambda step: one_step(setup, model, step), before_update=meet)


def shared_key_right(setup: Setup, trained: Trained) -> str:
    return like(setup, trained, with_multi_query(setup, None))


def own_dropout(setup: Setup) -> Trained:
    """Tensor parallel by hand with dropout between layers. Bug: every rank has a seed of its own,
    so each drops other elements of what all of them hold."""
    model = whole(setup, Cut(dist.group.WORLD), dropout=0.2)
    cuts = cut_from(whole(setup), model, dist.get_rank(), setup.ranks)
    torch.manual_seed(1_000 * setup.seed + (dist.get_rank() if setup.is_faulty else 0))
    return trained_by_hand(setup, Trained(model, cuts=cuts))


def losses_agree(setup: Setup, trained: Trained) -> str:
    """Losses and what is not cut must be the same on all ranks."""
    losses = {f"step {n}": loss for n, loss in enumerate(trained.losses)}
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    return truth.said("losses differ", truth.differing(losses)) or truth.said(
        "replicated parameters differ", truth.differing(kept)
    )


def own_norm(setup: Setup) -> Trained:
    """Tensor parallel by hand with clipping. Bug: every rank takes the norm of what it holds, so
    what all of them hold is scaled differently."""
    trained = cut_by_hand(setup, dist.group.WORLD)
    parameters = dict(trained.model.named_parameters())

    def clip(step: int) -> None:
        squares = torch.zeros(())
        for name, parameter in parameters.items():
            share = 1.0 if name in trained.cuts or setup.is_faulty else 1 / setup.ranks
            squares += parameter.grad.square().sum() * share
        if not setup.is_faulty:
            dist.all_reduce(squares)
        for parameter in parameters.values():
            parameter.grad *= 0.1 / squares.sqrt()

    return train(
        trained,
        sgd(trained.model),
        lambda step: one_step(setup, trained.model, step),
        before_update=clip,
    )


def clipped_alike(setup: Setup, trained: Trained) -> str:
    """The norm of all gradients together must be what was asked for, and replicas agree."""
    whole_norm = torch.stack([g.norm() for g in truth.whole_gradients(trained).values()]).norm()
    wrong = [f"{float(whole_norm):.4f}"] if abs(float(whole_norm) - 0.1) > 0.001 else []
    kept = {n: g for n, g in trained.gradients.items() if n not in trained.cuts}
    return truth.said("replicated gradients differ", truth.differing(kept)) or truth.said(
        "norm, not 0.1", wrong
    )


class AdaptedHead(nn.Module):
    """The head with a low-rank adapter beside it; both are whole on every rank."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.inner = head
        self.adapter = Adapter(head)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.adapter(x)


def adapters_by_rank(setup: Setup) -> Trained:
    """Tensor parallel by hand with an adapter at the head. Bug: adapters are made after every rank
    got a seed of its own, and nobody broadcasts them."""
    trained = cut_by_hand(setup, dist.group.WORLD)
    torch.manual_seed(300 + setup.seed + (dist.get_rank() if setup.is_faulty else 0))
    trained.model.head = AdaptedHead(trained.model.head)
    return trained_by_hand(setup, trained)


def adapters_alike(setup: Setup, trained: Trained) -> str:
    """Adapters must begin, and what is not cut must stay, the same on all ranks."""
    begun = {n: p for n, p in trained.before.items() if "adapter" in n}
    kept = {n: p for n, p in trained.model.named_parameters() if n not in trained.cuts}
    return truth.said("adapters begin differently", truth.differing(begun)) or truth.said(
        "replicated parameters differ", truth.differing(kept)
    )
