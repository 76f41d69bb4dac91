"""Programs with several models, or several jobs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from tests.lab.faults.model import filled
from tests.lab.faults.setup import Setup, Trained
from tests.lab.unusual.material import (
    ROWS,
    WIDTH,
    Net,
    average,
    backward,
    normal,
    part,
    rows,
    sgd,
)


class Adversaries(nn.Module):
    """A generator and what judges it, kept together for the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Net(layers=1, outside=WIDTH)
        self.judge = Net(layers=1, outside=1)


def adversarial(setup: Setup, pair: Adversaries, generator: nn.Module, judge: nn.Module) -> Trained:
    """Train both by turns; each has its own optimizer."""
    for_generator, for_judge = sgd(pair.generator, 0.1), sgd(pair.judge, 0.1)
    trained = Trained(pair)
    for step in range(2):
        real = part(rows(setup, step), setup)
        noise = part(normal(setup, step, 3, shape=(ROWS, WIDTH)), setup)
        for_judge.zero_grad()
        made = generator(noise)
        (F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()).backward()
        if generator is pair.generator and setup.ranks > 1:
            average(pair.judge.parameters())
        for_judge.step()
        for_generator.zero_grad()
        pair.judge.requires_grad_(False)
        loss = F.softplus(-judge(made)).mean()
        trained.losses.append(backward(loss).detach())
        pair.judge.requires_grad_(True)
        if generator is pair.generator and setup.ranks > 1 and not setup.is_faulty:
            average(pair.generator.parameters())
        for_generator.step()
    return trained


def adversaries(setup: Setup) -> Trained:
    """A generative pair, gradients of both averaged by hand. Mistake: those of the generator are
    not."""
    pair = filled(setup, Adversaries)
    return adversarial(setup, pair, pair.generator, pair.judge)
