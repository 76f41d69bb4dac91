"""Gradients between backward and the step, in programs of rarer kinds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.record.phases import Phase
from tests.agent.test_accumulated import events, loss, traced
from tests.models import trace


def test_a_gradient_that_something_stepped_with_is_not_called_wiped(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model, 0).backward()
        with torch.no_grad():  # sharpness-aware minimization climbs first
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.1)
        optimizer.zero_grad()
        loss(model, 0).backward()
        optimizer.step()

    assert not events(traced(tmp_path, loop), Phase.ACCUMULATED)


def test_a_step_inside_of_a_closure_keeps_nothing(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            lbfgs.zero_grad()
            made = loss(model, 0)
            made.backward()
            return made

        lbfgs.step(closure)

    assert not events(traced(tmp_path, loop), Phase.ACCUMULATED)


def test_a_pass_that_raised_leaves_the_next_one_readable(tmp_path: Path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no gradient")

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            model(Fails.apply(torch.ones(3, 4, requires_grad=True))).sum().backward()
        except ArithmeticError:
            optimizer.zero_grad()
        loss(model, 1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    assert len(events(traced(tmp_path, loop), Phase.ACCUMULATED)) == 1


def test_reentrant_checkpointing_is_one_pass(tmp_path: Path):
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            x = checkpoint(self.b, x, use_reentrant=True)
            return checkpoint(self.b, x, use_reentrant=True)

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        model(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    found = trace(tmp_path, loop, model)
    (left,) = events(found, Phase.ACCUMULATED)
    assert len(left) == 4


def test_gradients_are_not_read_ahead_where_two_threads_train(tmp_path: Path):
    """The other thread may free or write its own at that moment."""

    def clip(model: nn.Module, seeds: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in seeds:
            optimizer.zero_grad()
            loss(model, seed).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        clip(model, range(2))
        other = nn.Sequential(nn.Linear(4, 2))
        thread = threading.Thread(target=clip, args=(other, range(1)))
        thread.start()
        thread.join(120)
        clip(model, range(2, 5))

    found = traced(tmp_path, loop)
    steps = {s.step for s in found.steps for top in s.nodes if top.phase is Phase.ACCUMULATED}
    assert steps == {0, 1}
