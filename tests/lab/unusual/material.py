"""What the programs are made of: small models, their numbers, and collectives in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.setup import Setup, Trained, train

ROWS = 12
"""Of a step over all ranks together: 2, 3 and 4 ranks share them evenly."""
WIDTH = 8


class Block(nn.Module):
    """A norm and two linear layers around a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows [n, width] to [n, outside]."""

    def __init__(self, layers: int = 2, width: int = WIDTH, outside: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.leave = nn.Linear(width, outside)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def normal(setup: Setup, *key: int, shape: tuple[int, ...]) -> Tensor:
    """Return random numbers that follow from the seed of the run and a key."""
    return torch.randn(shape, generator=chooser(setup, *key))


def whole_numbers(setup: Setup, *key: int, below: int, shape: tuple[int, ...]) -> Tensor:
    """Return random whole numbers that follow from the seed of the run and a key."""
    return torch.randint(below, shape, generator=chooser(setup, *key))


def chooser(setup: Setup, *key: int) -> torch.Generator:
    """Return a generator that follows from the seed of the run and a key."""
    seed = 36 + setup.seed
    for part in key:
        seed = (1_009 * seed + part + 1) % (2**31 - 1)
    return torch.Generator().manual_seed(seed)


def rows(setup: Setup, step: int, width: int = WIDTH, count: int = ROWS) -> Tensor:
    """Return the rows of one step, of all ranks together."""
    return normal(setup, step, shape=(count, width))


def labels(setup: Setup, step: int, below: int = 4, count: int = ROWS) -> Tensor:
    """Return the classes of these rows."""
    return whole_numbers(setup, step, 77, below=below, shape=(count,))


def part(x: Tensor, setup: Setup, rank: int | None = None) -> Tensor:
    """Return the rows of one data-parallel rank, by default of this one; of one process all."""
    if setup.ranks == 1:
        return x
    return x.chunk(setup.ranks)[dist.get_rank() if rank is None else rank]


def class_loss(setup: Setup, model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """Return the mean cross entropy of a rank's rows."""
    made = model(part(rows(setup, step), setup, rank))
    return F.cross_entropy(made, part(labels(setup, step), setup, rank))


def backward(loss: Tensor) -> Tensor:
    """Run backward and hand the loss on."""
    loss.backward()
    return loss


def sgd(model: nn.Module, rate: float = 0.2, momentum: float = 0.0) -> torch.optim.Optimizer:
    """Return the optimizer of most programs."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def in_one_process(
    setup: Setup, model: nn.Module, loss_of: Callable[[int], Tensor], rate: float = 0.2
) -> Trained:
    """Train plainly on what `loss_of` says of a step."""
    return train(Trained(model), sgd(model, rate), lambda step: backward(loss_of(step)))


def summed(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum over ranks, without a graph."""
    total = x.detach().clone().contiguous()
    dist.all_reduce(total, group=group)
    return total


def averaged(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean over ranks, without a graph."""
    return summed(x, group) / dist.get_world_size(group)


def gathered(x: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the values of all ranks, without a graph."""
    x = x.detach().contiguous()
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x, group=group)
    return pieces


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Average gradients over ranks, as zeros where a rank has none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


class SummedBoth(torch.autograd.Function):
    """The sum over ranks; its gradient is summed over ranks too, as each rank has a loss of its
    own that depends on the sum."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return summed(gradient)


class GatheredBoth(torch.autograd.Function):
    """Rows of all ranks; backward sums what the ranks' losses say of this rank's rows."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.cat(gathered(x))

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return summed(gradient).chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def shifted(x: Tensor, by: int = 1) -> Tensor:
    """Send to the rank that follows by so many in the ring, and return what came from behind."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    taken = torch.empty_like(x.contiguous())
    sends = dist.P2POp(dist.isend, x.detach().contiguous(), (rank + by) % ranks)
    takes = dist.P2POp(dist.irecv, taken, (rank - by) % ranks)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()
    return taken
