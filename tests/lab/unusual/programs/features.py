"""Losses over the features of all ranks, and codebooks that all ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    ROWS,
    WIDTH,
    GatheredBoth,
    Net,
    SummedBoth,
    average,
    backward,
    gathered,
    in_one_process,
    normal,
    part,
    rows,
    sgd,
    summed,
)


class TwoTowers(nn.Module):
    """Two encoders to one space."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(layers=1), Net(layers=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)


def views(setup: Setup, step: int) -> tuple[Tensor, Tensor]:
    """Return both sides of all rows."""
    return rows(setup, step), rows(setup, step) + 0.5 * normal(setup, step, 9, shape=(ROWS, WIDTH))


def sides(setup: Setup, model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """Return the features of this rank's rows."""
    x, y = views(setup, step)
    return model(part(x, setup), part(y, setup))


def contrast(left: Tensor, right: Tensor, first: int = 0) -> Tensor:
    """Return the mean loss of rows on the left, whose partners on the right begin at `first`."""
    return F.cross_entropy(5 * left @ right.T, torch.arange(first, first + len(left)))


def contrast_both(left: Tensor, right: Tensor) -> Tensor:
    return (contrast(left, right) + contrast(right, left)) / 2


def contrast_alone(setup: Setup) -> Trained:
    """One process with all rows."""
    model = filled(setup, TwoTowers)
    return in_one_process(setup, model, lambda step: contrast_both(*sides(setup, model, step)))


def contrasted(setup: Setup) -> Trained:
    """Each rank contrasts its own rows with those of all ranks, and gradients go back through the
    gather. Mistake: the gather gives no gradient."""
    model = filled(setup, TwoTowers)

    def one(step: int) -> Tensor:
        left, right = sides(setup, model, step)
        if setup.is_faulty:
            all_left, all_right = torch.cat(gathered(left)), torch.cat(gathered(right))
        else:
            all_left, all_right = GatheredBoth.apply(left), GatheredBoth.apply(right)
        first = dist.get_rank() * len(left)
        loss = contrast(left, all_right, first) + contrast(right, all_left, first)
        return backward(loss / 2)

    return train(
        Trained(model), sgd(model), one, before_update=lambda step: average(model.parameters())
    )


def contrasted_once(setup: Setup) -> Trained:
    """Every rank has the whole loss with a gradient for its own rows alone: gradients are added.
    Mistake: they are averaged."""
    model = filled(setup, TwoTowers)

    def among_all(mine: Tensor) -> Tensor:
        pieces = gathered(mine)
        pieces[dist.get_rank()] = mine
        return torch.cat(pieces)

    def meet(step: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            if setup.is_faulty:
                p.grad /= setup.ranks

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(contrast_both(*map(among_all, sides(setup, model, step)))),
        before_update=meet,
    )


class Twin(nn.Module):
    """One encoder for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Net(layers=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(x), self.encoder(y)


def redundancy(cross: Tensor) -> Tensor:
    """Return how far a correlation of [width, width] is from one on the diagonal alone."""
    return (cross - torch.eye(len(cross))).square().sum()


def redundancy_alone(setup: Setup) -> Trained:
    """One process: features whitened column by column over all rows."""
    model = filled(setup, Twin)

    def loss_of(step: int) -> Tensor:
        white = [
            (z - z.mean(0)) / z.var(0, unbiased=False).add(1e-5).sqrt()
            for z in sides(setup, model, step)
        ]
        return redundancy(white[0].T @ white[1] / ROWS)

    return in_one_process(setup, model, loss_of, 0.02)


def whitened(setup: Setup) -> Trained:
    """Barlow twins over ranks: means, variances and the correlation are sums over ranks with
    gradients. Mistake: the correlation is that of this rank's rows."""
    model = filled(setup, Twin)

    def one(step: int) -> Tensor:
        white = []
        for z in sides(setup, model, step):
            mean = SummedBoth.apply(z.sum(0)) / ROWS
            variance = SummedBoth.apply((z - mean).square().sum(0)) / ROWS
            white.append((z - mean) / variance.add(1e-5).sqrt())
        cross = white[0].T @ white[1]
        cross = cross / len(white[0]) if setup.is_faulty else SummedBoth.apply(cross) / ROWS
        return backward(redundancy(cross))

    return train(
        Trained(model),
        sgd(model, 0.02),
        one,
        before_update=lambda step: average(model.parameters()),
    )


class Codes(nn.Module):
    """The nearest of some codes, which are averages over time of what was nearest to them."""

    def __init__(self, count: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(count))
        self.register_buffer("sums", torch.zeros(count, width))
        self.is_shared, self.is_half_shared = False, False

    def forward(self, x: Tensor) -> Tensor:
        codes = self.sums / self.counts[:, None]
        chosen = F.one_hot(torch.cdist(x, codes).argmin(1), len(codes)).float()
        if self.training:
            counts, sums = chosen.sum(0), chosen.T @ x.detach()
            if self.is_shared:
                sums = summed(sums)
                counts = counts if self.is_half_shared else summed(counts)
            self.counts.lerp_(counts + 0.1, 0.3)
            self.sums.lerp_(sums, 0.3)
        return x + (chosen @ codes - x).detach()


class Coder(nn.Module):
    """Rows to codes and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Net(layers=1, outside=WIDTH)
        self.codes = Codes()
        self.decoder = Net(layers=1, outside=WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        return self.decoder(self.codes(z)), z


def coder(setup: Setup) -> Coder:
    model = filled(setup, Coder)
    model.codes.sums.copy_(normal(setup, 4, shape=tuple(model.codes.sums.shape)))
    return model


def coder_loss(setup: Setup, model: nn.Module, step: int) -> Tensor:
    """Return the loss of what comes back, and of features far from their codes."""
    x = part(rows(setup, step), setup)
    made, z = model(x)
    return F.mse_loss(made, x) + 0.25 * z.square().mean()


def coder_alone(setup: Setup) -> Trained:
    """One process."""
    model = coder(setup)
    return in_one_process(setup, model, lambda step: coder_loss(setup, model, step))


def coded(setup: Setup) -> Trained:
    """A codebook of averages over time that are summed over ranks. Mistake: one of the two sums,
    the counts, is not."""
    model = coder(setup)
    model.codes.is_shared, model.codes.is_half_shared = True, setup.is_faulty
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(coder_loss(setup, model, step)),
        before_update=lambda step: average(model.parameters()),
    )


class Queued(nn.Module):
    """An encoder, a slow copy of it for keys, and a queue of keys of the steps before."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.keys = Net(layers=1), Net(layers=1).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(2 * ROWS, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            keys = F.normalize(self.keys(y), dim=-1)
        return F.normalize(self.encoder(x), dim=-1), keys


def queued_model(setup: Setup) -> Queued:
    model = filled(setup, Queued)
    model.keys.load_state_dict(model.encoder.state_dict())
    model.queue.copy_(F.normalize(normal(setup, 53, shape=(2 * ROWS, 4)), dim=-1))
    return model


def queued_step(setup: Setup, model: Queued, step: int) -> tuple[Tensor, Tensor]:
    """Return the loss against the queue, and this rank's keys; the slow copy follows first."""
    with torch.no_grad():
        for slow, fast in zip(model.keys.parameters(), model.encoder.parameters()):
            slow.lerp_(fast, 0.1)
    made, keys = sides(setup, model, step)
    hits = (made * keys).sum(-1, keepdim=True)
    logits = 5 * torch.cat([hits, made @ model.queue.clone().T], 1)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)), keys


def queued_alone(setup: Setup) -> Trained:
    """One process."""
    model = queued_model(setup)

    def one(step: int) -> Tensor:
        loss, keys = queued_step(setup, model, step)
        model.queue.copy_(torch.cat([keys, model.queue])[: 2 * ROWS])
        return backward(loss)

    return train(Trained(model), sgd(model.encoder), one)


def queued(setup: Setup) -> Trained:
    """A queue of the keys of all ranks. Mistake: one rank puts in its own keys in the place of all
    ranks'."""
    rank = dist.get_rank()
    model = queued_model(setup)

    def one(step: int) -> Tensor:
        loss, keys = queued_step(setup, model, step)
        pieces = gathered(keys)
        if setup.strikes(rank):
            pieces = [keys] * setup.ranks
        model.queue.copy_(torch.cat([*pieces, model.queue])[: 2 * ROWS])
        return backward(loss)

    return train(
        Trained(model),
        sgd(model.encoder),
        one,
        before_update=lambda step: average(model.encoder.parameters()),
    )
