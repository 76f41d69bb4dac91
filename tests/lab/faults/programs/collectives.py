"""Programs with collectives of their own inside a module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.lab.faults import truth
from tests.lab.faults.model import whole
from tests.lab.faults.programs.data import sgd, step_of
from tests.lab.faults.setup import Setup, Trained, train


class Statistics(nn.Module):
    """Centre and scale features with statistics of all ranks: two all-reduces of one shape."""

    def __init__(self, hidden: int, is_swapped: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(hidden))
        self._is_swapped = is_swapped
        self.summed: list[tuple[Tensor, Tensor]] = []
        """What each all-reduce of a call was given, and gave, for the oracle."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.detach().float().flatten(0, -2)
        first, second = flat.mean(0), flat.square().mean(0)
        if self._is_swapped:
            second, first = self.sum_of_squares(second), self.sum_of_values(first)
        else:
            first, second = self.sum_of_values(first), self.sum_of_squares(second)
        ranks = dist.get_world_size()
        spread = (second / ranks - (first / ranks).square()).clamp_min(0) + 1.0
        return (x - (first / ranks).to(x.dtype)) * (self.gain / spread.sqrt()).to(x.dtype)

    def sum_of_values(self, own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total)
        self.summed.append((own, total))
        return total

    def sum_of_squares(self, own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total)
        self.summed.append((own, total))
        return total


class Centred(nn.Module):
    """A layer's feed-forward behind statistics of all ranks."""

    def __init__(self, inner: nn.Module, hidden: int, is_swapped: bool) -> None:
        super().__init__()
        self.statistics = Statistics(hidden, is_swapped)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.statistics(x))


def swapped(setup: Setup) -> Trained:
    """Data parallelism with statistics over ranks in every layer. Fault: on one rank one layer
    issues its two all-reduces in the other order."""
    model = whole(setup)
    rank = dist.get_rank()
    for number, block in model.layers.items():
        is_swapped = setup.strikes(rank, int(number))
        hidden = setup.shape.hidden
        block.feed_forward = Centred(block.feed_forward, hidden, is_swapped).to(setup.torch_dtype)
    wrapped = DDP(model)
    return train(Trained(model), sgd(model), lambda step: step_of(setup, wrapped, step))


def sums_are_sums(setup: Setup, trained: Trained) -> str:
    """What each all-reduce of values gave must be the sum of what ranks meant for it."""
    wrong = []
    for number, block in trained.model.layers.items():
        calls = block.feed_forward.statistics.summed[:2]
        values, squares = calls if not block.feed_forward.statistics._is_swapped else calls[::-1]
        for name, (own, total) in (("values", values), ("squares", squares)):
            meant = torch.stack(truth.everywhere(own)).sum(0)
            if not torch.allclose(meant, total, rtol=1e-4, atol=1e-5):
                wrong.append(f"{name} of layers.{number}")
    return truth.said("not the sum of what was meant", truth.united(wrong))
