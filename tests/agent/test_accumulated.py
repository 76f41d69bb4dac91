"""What backward left is read beside what the optimizer takes, and written where they differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.record.phases import Phase
from rankscope.tree.jsontext import write_nodes
from rankscope.tree.views import Step, Trace
from tests.models import trace

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def traced(out: Path, loop: Loop, **settings: Any) -> Trace:
    """Trace `loop` on two linear layers, with an optimizer of their parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trace(out, lambda: loop(model, optimizer), model, **settings)


def events(found: Trace, phase: Phase) -> list[dict[str, Any]]:
    """Return for every event of a phase {path:slot: value of rank 0 as in the JSON}."""
    return [
        {
            f"{node['path']}:{slot['slot']}": slot["values"][0]
            for node in nodes(top)
            for slot in node["slots"]
        }
        for step in found.steps
        for top in listed(step)
        if top["phase"] == phase.word
    ]


def listed(step: Step) -> list[dict[str, Any]]:
    text: list[str] = []
    write_nodes(step, "\n", text.append)
    found: list[dict[str, Any]] = json.loads("".join(text))
    return found


def nodes(top: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield top
    for child in top["children"]:
        yield from nodes(child)


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return model(torch.randn(3, 4, generator=made)).square().mean()


def test_a_step_with_what_backward_left_has_no_record_more(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(2):
            optimizer.zero_grad()
            loss(model, 2 * seed).backward()
            loss(model, 2 * seed + 1).backward()
            optimizer.step()

    found = traced(tmp_path, loop)
    assert len(events(found, Phase.GRADS)) == 2
    assert not events(found, Phase.ACCUMULATED)


def test_gradients_that_were_clipped_are_recorded_as_backward_left_them(tmp_path: Path):
    norms = []

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model, 0).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()

    found = traced(tmp_path, loop)
    (before,), (after,) = events(found, Phase.ACCUMULATED), events(found, Phase.GRADS)
    assert before.keys() == after.keys() and len(before) == 4
    total = sum(each["digest"]["l2"] ** 2 for each in before.values()) ** 0.5
    assert abs(total - float(norms[0])) < 1e-6
    for name, each in before.items():
        ratio = after[name]["digest"]["l2"] / each["digest"]["l2"]
        assert abs(ratio - 0.01 / total) < 1e-3 * ratio


def test_what_an_in_place_write_past_autograd_does_is_seen(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model, 0).backward()
        model[0].weight.grad.data.mul_(0.5)  # leaves the version as it is
        optimizer.step()

    found = traced(tmp_path, loop)
    assert len(events(found, Phase.ACCUMULATED)) == 1


def test_gradients_wiped_between_two_passes_are_recorded_and_marked(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model, 0).backward()
        optimizer.zero_grad()
        loss(model, 1).backward()
        optimizer.step()

    found = traced(tmp_path, loop)
    first, second = events(found, Phase.ACCUMULATED)
    assert all("flags" not in each for each in first.values())
    assert all(each["flags"] == ["restarted"] for each in second.values())
    (taken,) = events(found, Phase.GRADS)
    assert {n: v["digest"]["hash"] for n, v in second.items()} == {
        n: v["digest"]["hash"] for n, v in taken.items()
    }


def test_gradients_set_to_zero_count_as_wiped(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model, 0).backward()
        optimizer.zero_grad(set_to_none=False)
        loss(model, 1).backward()
        optimizer.step()

    assert len(events(traced(tmp_path, loop), Phase.ACCUMULATED)) == 2


def test_without_the_phase_nothing_is_read(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model, 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    found = traced(tmp_path, loop, phases=("forward", "grads"))
    assert events(found, Phase.GRADS) and not events(found, Phase.ACCUMULATED)


def test_training_is_the_same_with_and_without(tmp_path: Path):
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            loss(model, seed).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])

    ends: list[list[torch.Tensor]] = []
    traced(tmp_path, loop)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(torch.equal(one, other) for one, other in zip(*ends))
