"""Living optimizers are known without a search of the heap in every step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.agent.guard import Guard
from rankscope.agent.steps.optimizers import (
    OptimizerSearch,
    _has_been_made,
    _optimizer_classes,
)
from tests.models import Net, trace


@pytest.fixture(autouse=True)
def no_optimizer_stays() -> Iterator[None]:
    """What another test left in a cycle would count as an optimizer."""
    gc.collect()
    yield
    gc.collect()


@pytest.fixture
def search() -> Iterator[OptimizerSearch]:
    """A search that is on."""
    errors: list[Exception] = []
    search = OptimizerSearch(Guard(errors.append))
    search.install()
    yield search
    search.uninstall()
    assert not errors


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def heap_walks(work: Callable[[], object]) -> int:
    """Return how often `work` had the garbage collector hand over the objects of the process."""
    walks = [0]

    def count(frame: object, event: str, argument: object) -> None:
        walks[0] += event == "c_call" and argument in (gc.get_objects, gc.get_referrers)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return walks[0]


def train_flat(model: nn.Module, steps: int) -> None:
    """Train by a flat master copy, as DeepSpeed does: no optimizer holds the modules' parameters.

    Each group is a step of the optimizer of its own, as under ZeRO.
    """
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    optimizer = torch.optim.SGD([flat], lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 8)).square().mean().backward()
        flat.grad = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
        )
        for _ in range(3):
            optimizer.step()
        start = 0
        for parameter in parameters:
            parameter.data.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            parameter.grad = None
            start += parameter.numel()


def test_steps_whose_parameters_no_optimizer_holds_walk_the_heap_once_at_most(
    tmp_path: Path,
) -> None:
    """Not at all in a process where no optimizer was ever made before."""
    was_made = any(_has_been_made(cls) for cls in _optimizer_classes())
    walks = heap_walks(lambda: trace(tmp_path, lambda: train_flat(Net(), steps=5), steps="all"))
    assert walks == int(was_made)


def test_one_walk_finds_the_optimizers_of_before_and_no_step_walks_again(tmp_path: Path) -> None:
    """They can be found in no other way, and whether one is alive decides what a step is."""
    before = sgd()
    walks = heap_walks(lambda: trace(tmp_path, lambda: train_flat(Net(), steps=5), steps="all"))
    assert walks == 1
    del before


def test_an_optimizer_made_before_is_found(search: OptimizerSearch) -> None:
    assert not search.exists()
    search.uninstall()
    before = sgd()
    later = OptimizerSearch(Guard(lambda error: None))
    later.install()
    assert later.exists()
    later.uninstall()
    del before


def test_the_class_of_all_optimizers_is_left_as_it_was(tmp_path: Path) -> None:
    members = ("__init__", "__setstate__")
    before = [vars(torch.optim.Optimizer)[name] for name in members]
    with rankscope.trace(out=tmp_path / "trace"):
        assert [vars(torch.optim.Optimizer)[name] for name in members] != before
    assert [vars(torch.optim.Optimizer)[name] for name in members] == before
