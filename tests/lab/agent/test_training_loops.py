"""Ways to train that few people take: without optimizers, with flat copies, beside them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.agent.steps import optimizers
from rankscope.record.phases import Phase
from tests.agent.test_training_loops import (
    Net,
    batch,
    errors,
    flags,
    loss_of,
    norms,
    sgd,
    train_steps,
)
from tests.agent.test_training_loops import no_optimizer_stays as no_optimizer_stays
from tests.noted import remarks
from tests.unharmed import traced_unharmed


def by_hand(way: str) -> Callable[[], Any]:
    """Train without an optimizer object."""

    def program() -> Any:
        model = Net()
        for _ in range(3):
            loss = loss_of(model)
            if way == "autograd.grad":
                slopes = torch.autograd.grad(loss, list(model.parameters()))
            else:
                loss.backward()
                slopes = tuple(p.grad for p in model.parameters())
            if way == "data":
                for parameter, slope in zip(model.parameters(), slopes, strict=True):
                    parameter.data -= 0.1 * slope
            else:
                with torch.no_grad():
                    for parameter, slope in zip(model.parameters(), slopes, strict=True):
                        parameter -= 0.1 * slope
            if way != "keeps":
                model.zero_grad()
        return model

    return program


@pytest.mark.parametrize("way", ["data", "no_grad", "autograd.grad", "keeps"])
def test_without_an_optimizer_every_forward_is_a_step_and_shows_what_it_left(
    tmp_path: Path, way: str
) -> None:
    gc.collect()
    kept: list[Net] = []  # as a script keeps its model: what is gone cannot be read

    def program() -> Any:
        kept[:] = [by_hand(way)()]
        return kept[0]

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    steps = train_steps(found)
    assert len(steps) == 3
    for step in steps:
        phases = [n.phase for n in step.nodes if n.phase in (Phase.GRADS, Phase.PARAMS)]
        assert phases == ([Phase.GRADS] if way == "keeps" else []) + [Phase.PARAMS]
        assert flags(step, Phase.PARAMS) == {("after_call",)}
    last = found.value("last", "param:weight", step=2, phase="params").per_rank[0]
    assert last is not None and last.l2 == pytest.approx(norms([kept[0].last.weight])[0], rel=1e-6)


def test_a_gradient_that_no_optimizer_will_use_is_marked(tmp_path: Path) -> None:
    def program() -> Any:
        model = Net()
        model.norm.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([*model.first.parameters()], lr=0.1)
        other = torch.optim.SGD([model.last.weight], lr=0.1)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            other.step()
        return model

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    step = train_steps(found)[1]
    marked = {
        (node.path, view.slot)
        for node in step.walk()
        for view in node.slots
        if any("unheld" in fold.flags for fold in view.folds)
    }
    assert marked == {("norm", "grad:bias"), ("last", "grad:bias")}
    assert found.value("last", "grad:weight", step=1, phase="grads", ordinal=1)


def by_flat_copies(kept: list[Net], norms_left: list[list[float | None]]) -> Callable[[], Any]:
    """Train as DeepSpeed does: the optimizer holds one flat copy a group and steps once for each,
    gradients are taken from the parameters before, and these get the new values after the last.
    """

    def program() -> Any:
        model = Net()
        model.norm.weight.requires_grad_(False)
        kept[:], norms_left[:] = [model], []
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [[p for p in trained if p.dim() == dims] for dims in (2, 1)]
        flats = [torch.cat([p.detach().reshape(-1) for p in group]) for group in groups]
        optimizer = torch.optim.SGD([{"params": [flat]} for flat in flats], lr=0.1)
        whole = optimizer.param_groups
        for _ in range(3):
            loss_of(model).backward()
            for group, flat in zip(groups, flats, strict=True):
                flat.grad = torch.cat([p.grad.reshape(-1) for p in group if p.grad is not None])
            model.zero_grad()
            for number, (group, flat) in enumerate(zip(groups, flats, strict=True)):
                optimizer.param_groups = [whole[number]]
                optimizer.step()
                sizes = [p.numel() for p in group]
                for parameter, part in zip(group, flat.split(sizes), strict=True):
                    parameter.data.copy_(part.view_as(parameter))
            norms_left.append(norms(trained))
        return model

    return program


def test_parameters_trained_by_flat_copies_are_read_once_a_step_as_training_left_them(
    tmp_path: Path,
) -> None:
    """Whoever copies them back does so behind the optimizer's own step, often group by group:
    between those steps they are half new, and read for nothing. Each group is one optimizer step
    of the same train step, also where the process has compiled something.
    """
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    assert optimizers.dynamo_has_compiled()
    kept: list[Net] = []
    left: list[list[float | None]] = []
    found = traced_unharmed(by_flat_copies(kept, left), tmp_path / "trace", steps="all")
    assert not errors(found)
    steps = train_steps(found)
    assert len(steps) == 3
    for step, truth in zip(steps, left, strict=True):
        slots: dict[str, list[str]] = {"grad": [], "param": []}
        shown: list[float | None] = []
        for node in step.walk():
            for view in node.slots if node.phase in (Phase.GRADS, Phase.PARAMS) else ():
                kind, _, name = view.slot.partition(":")
                if kind in slots:
                    slots[kind].append(f"{node.path}.{name}")
                if kind == "param":
                    assert view.folds[0].flags == ("after_call",)
                    (digest,) = view.per_rank().values()
                    shown += [] if (node.path, name) == ("norm", "weight") else [digest.l2]
        names = [name for name, _ in kept[0].named_parameters()]
        assert sorted(slots["param"]) == sorted(names)
        assert sorted(slots["grad"]) == sorted(set(names) - {"norm.weight"})
        assert sorted(n for n in shown if n) == pytest.approx(sorted(n for n in truth if n))
    assert found.value("last", "param:weight", step=2, phase="params")


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: another test of this one may have compiled something, after which
    an optimizer that steps again without a root forward is taken for a step of a compiled model.
    """
    monkeypatch.setattr(optimizers, "dynamo_has_compiled", lambda: False)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_gradient_that_comes_between_two_optimizer_steps_is_recorded_though_nobody_holds_it(
    tmp_path: Path,
) -> None:
    def program() -> Any:
        model = Net()
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
        for _ in range(2):
            hidden = model.norm(model.first(batch()))  # no root forward yet: the next one is
            out = model(batch())
            hidden.square().mean().backward()
            optimizer.step()
            out.square().mean().backward()
            optimizer.step()
            model.zero_grad()
        return model

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert found.value("last", "grad:weight", step=train_steps(found)[-1].step, phase="grads",
                       ordinal=1)  # fmt: skip


def test_an_optimizer_that_holds_what_the_model_no_longer_has_is_noted(tmp_path: Path) -> None:
    def program() -> Any:
        model = Net()
        optimizer = sgd(model)
        model.last = nn.Linear(6, 2)  # as fully_shard and parallelize_module put new parameters in
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
        return model

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert tuple(map(str, remarks(train_steps(found)[0]))) == (
        "rank 0: SGD holds 4 parameters of the modules seen, and 2 that none of them owns "
        "(2 without a gradient; shapes [2, 6], [2])",
    )
    assert ("unheld",) in flags(train_steps(found)[0], Phase.GRADS)
