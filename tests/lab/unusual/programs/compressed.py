"""Gradients that are changed on their way: compressed, rounded, with noise."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained, train
from tests.lab.unusual.material import (
    ROWS,
    Net,
    average,
    averaged,
    backward,
    chooser,
    class_loss,
    gathered,
    in_one_process,
    labels,
    normal,
    part,
    rows,
    sgd,
    summed,
)
from tests.lab.unusual.truths import State, state


def net_alone(setup: Setup) -> Trained:
    """One process, nothing changed."""
    model = filled(setup, Net)
    return in_one_process(setup, model, lambda step: class_loss(setup, model, step))


RANK = 2
"""Of the matrices that stand for gradients."""


def sketch(setup: Setup, number: int, width: int) -> Tensor:
    return normal(setup, number, 45, shape=(width, RANK))


def low_rank(setup: Setup) -> Trained:
    """Gradients of matrices travel as two thin factors; what they miss is added the next time.
    Mistake: the second factor is not averaged."""
    model = filled(setup, Net)
    missed = [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def meet(step: int) -> None:
        for number, p in enumerate(model.parameters()):
            if p.dim() < 2:
                p.grad.copy_(averaged(p.grad))
                continue
            matrix = p.grad + missed[number]
            left = torch.linalg.qr(averaged(matrix @ sketch(setup, number, p.shape[1])))[0]
            right = matrix.T @ left
            right = right if setup.is_faulty else averaged(right)
            p.grad.copy_(left @ right.T)
            missed[number] = matrix - p.grad

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
        steps=3,
    )


def low_rank_written_out(setup: Setup) -> list[State]:
    """All ranks in one process."""
    model = filled(setup, Net)
    missed = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(setup.ranks)]
    for step in range(3):
        gradients = []
        for rank in range(setup.ranks):
            model.zero_grad()
            class_loss(setup, model, step, rank).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                mean = torch.stack([g[number] for g in gradients]).mean(0)
                if p.dim() == 2:
                    mean += torch.stack([m[number] for m in missed]).mean(0)
                    left = torch.linalg.qr(mean @ sketch(setup, number, p.shape[1]))[0]
                    mean = left @ (left.T @ mean)
                    for rank in range(setup.ranks):
                        missed[rank][number] += gradients[rank][number] - mean
                p -= 0.2 * mean
    return [state(model)] * setup.ranks


def signs(setup: Setup) -> Trained:
    """Signs and one scale a rank travel; what they miss is added the next time. Mistake: one rank
    reads all signs with its own scale."""
    rank = dist.get_rank()
    model = filled(setup, Net)
    missed = [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def meet(step: int) -> None:
        for number, p in enumerate(model.parameters()):
            goal = p.grad + missed[number]
            scale = goal.abs().mean()
            missed[number] = goal - scale * goal.sign()
            scales, all_signs = gathered(scale[None]), gathered(goal.sign())
            if setup.strikes(rank):
                scales = [scale] * setup.ranks
            p.grad.copy_(sum(s * sign for s, sign in zip(scales, all_signs)) / setup.ranks)

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
        steps=3,
    )


def signs_written_out(setup: Setup) -> list[State]:
    """All ranks in one process."""
    model = filled(setup, Net)
    missed = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(setup.ranks)]
    for step in range(3):
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(setup.ranks):
            model.zero_grad()
            class_loss(setup, model, step, rank).backward()
            for number, p in enumerate(model.parameters()):
                goal = p.grad + missed[rank][number]
                told = goal.abs().mean() * goal.sign()
                missed[rank][number] = goal - told
                totals[number] += told / setup.ranks
        with torch.no_grad():
            for p, total in zip(model.parameters(), totals):
                p -= 0.2 * total
    return [state(model)] * setup.ranks


def halves(setup: Setup) -> Trained:
    """Gradients travel in float16, by a hook of DDP."""
    model = filled(setup, Net)
    wrapped = DDP(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return train(
        Trained(model), sgd(model), lambda step: backward(class_loss(setup, wrapped, step))
    )


def add_noise(setup: Setup, model: nn.Module, step: int, key: int = 46) -> None:
    """Add noise that follows from the step."""
    generator = chooser(setup, step, key)
    for p in model.parameters():
        p.grad += 0.05 * torch.randn(p.shape, generator=generator)


def noise_alone(setup: Setup) -> Trained:
    """One process; noise on the gradients."""
    model = filled(setup, Net)
    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=lambda step: add_noise(setup, model, step),
    )


def noise(setup: Setup) -> Trained:
    """Noise on averaged gradients, drawn alike on all ranks. Mistake: one rank draws its own."""
    model = filled(setup, Net)
    key = 47 if setup.strikes(dist.get_rank()) else 46

    def meet(step: int) -> None:
        average(model.parameters())
        add_noise(setup, model, step, key)

    return train(
        Trained(model),
        sgd(model),
        lambda step: backward(class_loss(setup, model, step)),
        before_update=meet,
    )


def clipped_sums(setup: Setup, model: nn.Module, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and gradients of each row clipped and added up, by torch's transforms."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    x = part(rows(setup, step), setup)
    y = part(labels(setup, step), setup)

    def loss_of(values: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, values, row[None]), label[None])

    gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    factors = (0.5 / norms).clamp(max=1)
    sums = {n: torch.einsum("n,n...->...", factors, g) for n, g in gradients.items()}
    return cross_entropy(model(x), y), sums


def private(setup: Setup) -> Trained:
    """Gradients of single rows by `torch.func`, clipped, added over ranks, with noise that all
    ranks draw alike. Mistake: every rank adds the noise before the sum."""
    model = filled(setup, Net)
    is_alone = setup.ranks == 1

    def one(step: int) -> Tensor:
        loss, sums = clipped_sums(setup, model, step)
        generator = chooser(setup, step, 48)
        for name, p in model.named_parameters():
            mess = 0.3 * torch.randn(p.shape, generator=generator)
            total = sums[name] + mess * setup.is_faulty
            total = total if is_alone else summed(total)
            p.grad = (total + mess * (not setup.is_faulty)) / ROWS
        return loss

    return train(Trained(model), sgd(model), one)


def private_written_out(setup: Setup) -> list[State]:
    """One process, row by row, without transforms."""
    model = filled(setup, Net)
    for step in range(2):
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for row, label in zip(rows(setup, step), labels(setup, step)):
            model.zero_grad()
            cross_entropy(model(row[None]), label[None]).backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for total, p in zip(totals, model.parameters()):
                total += p.grad * min(1.0, 0.5 / float(norm))
        generator = chooser(setup, step, 48)
        with torch.no_grad():
            for total, p in zip(totals, model.parameters()):
                mess = 0.3 * torch.randn(p.shape, generator=generator)
                p -= 0.2 * (total + mess) / ROWS
    return [state(model)] * setup.ranks
