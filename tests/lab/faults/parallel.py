"""Parallelism written by hand, in the manner of Megatron: plain tensors and plain collectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import Parts

Group = dist.ProcessGroup


class Enter(torch.autograd.Function):
    """Into a split region: as it is forward, summed over the group backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class Leave(torch.autograd.Function):
    """Out of a split region: summed over the group forward, as it is backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Column(nn.Module):
    """A linear layer with some of the output features: [..., inside] to [..., outside / n]."""

    def __init__(self, inside: int, outside: int, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outside // dist.get_world_size(group), inside))
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Enter.apply(x, self._group), self.weight)


class Row(nn.Module):
    """A linear layer that holds some of the input features; its outputs are summed over ranks."""

    def __init__(self, inside: int, outside: int, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outside, inside // dist.get_world_size(group)))
        self._group = group
        self.is_reducing = True

    def forward(self, x: Tensor) -> Tensor:
        made = F.linear(x, self.weight)
        return Leave.apply(made, self._group) if self.is_reducing else made


class Cut(Parts):
    """A block's linear layers split over a group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def column(self, inside: int, outside: int) -> nn.Module:
        return Column(inside, outside, self._group)

    def row(self, inside: int, outside: int) -> nn.Module:
        return Row(inside, outside, self._group)


class GatherSequence(torch.autograd.Function):
    """[batch, heads, time / n, width] of every rank to the whole time; gradients summed back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        place = dist.get_rank(ctx.group)
        return summed.chunk(dist.get_world_size(ctx.group), 2)[place].contiguous(), None


class SequenceParts(Parts):
    """Attention over a sequence that is split over a group: keys and values are gathered."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def exchange(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return GatherSequence.apply(k, self._group), GatherSequence.apply(v, self._group)


class SequenceEnter(torch.autograd.Function):
    """[batch, time / n, ...] of every rank to the whole time; backward summed and split again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sequence_gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sequence_summed(gradient, ctx.group), None


class SequenceLeave(torch.autograd.Function):
    """[batch, time, ...] summed over ranks and split along time; backward gathered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sequence_summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sequence_gathered(gradient, ctx.group), None


def sequence_gathered(x: Tensor, group: Group) -> Tensor:
    pieces = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, 1)


def sequence_summed(x: Tensor, group: Group) -> Tensor:
    summed = x.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class SequenceColumn(Column):
    """A column whose inputs are split along the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(SequenceEnter.apply(x, self._group), self.weight)


class SequenceRow(Row):
    """A row whose outputs are split along the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return SequenceLeave.apply(F.linear(x, self.weight), self._group)


class SequenceCut(Cut):
    """Linear layers split over a group, everything between them split along the sequence."""

    def column(self, inside: int, outside: int) -> nn.Module:
        return SequenceColumn(inside, outside, self._group)

    def row(self, inside: int, outside: int) -> nn.Module:
        return SequenceRow(inside, outside, self._group)


class Exchange(torch.autograd.Function):
    """Rows [n, width] to the ranks that want them: `given[r]` to rank r, `taken[r]` from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: list[int], taken: list[int], group: Group) -> Tensor:
        ctx.given, ctx.taken, ctx.group = given, taken, group
        return exchanged(x, given, taken, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(gradient, ctx.taken, ctx.given, ctx.group), None, None, None


def exchanged(x: Tensor, given: list[int], taken: list[int], group: Group) -> Tensor:
    received = x.new_empty(sum(taken), x.shape[1])
    dist.all_to_all_single(received, x.contiguous(), taken, given, group=group)
    return received


def average_gradients(parameters: Iterable[nn.Parameter], group: Group, divisor: float) -> None:
    """Sum gradients over a group and divide: data parallelism without a wrapper."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= divisor
