"""Collectives within one process: which settings take them, what stands on torch and when, and the
spans of autograd nodes by which backward finds its module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.agent.hooks.calls import NodeMap, OpenCall, Scope
from rankscope.agent.hooks.modules import ModuleTable
from rankscope.capture.collectives import FUNCTIONAL, METHODS
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import OPS
from rankscope.tree.views import Node, Trace


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Summing(nn.Module):
    """A layer, and a sum over ranks inside it and inside what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = nn.Sequential(_Sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.layer(x))
        dist.all_reduce(x)
        return x


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        dist.all_reduce(x)
        return x


def traced(folder: Path, **settings: Any) -> Trace:
    model = Summing()
    with rankscope.trace(out=folder / "trace", steps="all", **settings) as handle, torch.no_grad():
        model(torch.ones(2, 3))
    return handle.open()


def issued(found: Trace) -> list[Node]:
    return [node for node in found.walk() if node.phase is Phase.COLLECTIVE]


@pytest.mark.usefixtures("alone")
def test_collectives_are_taken_by_default_and_left_out_with_their_phase(tmp_path: Path) -> None:
    assert [node.path for node in issued(traced(tmp_path / "a"))] == ["inner.0", ""]
    assert not issued(traced(tmp_path / "b", phases="forward,backward"))


@pytest.mark.usefixtures("alone")
def test_a_module_that_is_not_selected_shows_its_collectives_without_values(tmp_path: Path) -> None:
    nodes = {node.path: node for node in issued(traced(tmp_path, paths="inner.*"))}
    assert [slot.slot for slot in nodes["inner.0"].slots] == ["input.0", "output.0"]
    assert nodes[""].slots == ()
    assert [node.collectives[0][1]["sequence"] for node in nodes.values()] == [0, 1]


@pytest.mark.usefixtures("alone")
def test_slots_and_kept_tensors_reach_collectives_like_modules(tmp_path: Path) -> None:
    found = traced(tmp_path, slots="output*", tensors="inner.0:output.0")
    (node,) = (node for node in issued(found) if node.path == "inner.0")
    (slot,) = node.slots
    assert (slot.slot, [*slot.references()]) == ("output.0", [0])


@pytest.mark.usefixtures("alone")
def test_structure_alone_is_recorded_where_no_digest_is_wanted(tmp_path: Path) -> None:
    nodes = issued(traced(tmp_path, digest="none"))
    assert [(node.path, node.slots) for node in nodes] == [("inner.0", ()), ("", ())]


def test_every_op_that_is_recorded_is_one_that_rules_know() -> None:
    """Else a report would call an op of today unknown, and leave its collectives unjudged."""
    assert {form.op for form in METHODS.values()} | {*FUNCTIONAL.values()} == OPS.keys()
    assert all(form.root in OPS[form.op] for form in METHODS.values() if form.root)


def test_a_node_belongs_to_the_innermost_call_that_made_it() -> None:
    table, nodes = ModuleTable(), NodeMap()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    infos = [table.learn(model, None), *(table.get(child) for child in model)]
    scope = Scope(infos[0].root, Mode.TRAIN, 0, 0, is_muted=False)  # type: ignore[union-attr]
    frames = [
        OpenCall(module, info, scope, Phase.FORWARD, number, is_recorded=True)  # type: ignore[arg-type]
        for number, (module, info) in enumerate(zip((model, *model), infos))
    ]
    x = torch.ones(2, 2, requires_grad=True)
    nodes.begin(frames[0])
    before = x * 2
    nodes.begin(frames[1])
    first = model[0](before)
    nodes.end(frames[1])
    between = first * 2
    nodes.begin(frames[2])
    second = model[1](between)
    nodes.end(frames[2])
    after = second * 2
    nodes.end(frames[0])
    outside = after * 2

    def owner(value: torch.Tensor) -> int | None:
        assert value.grad_fn is not None
        found = nodes.find(value.grad_fn._sequence_nr())
        return None if found is None else found.sequence

    assert [owner(v) for v in (before, first, between, second, after)] == [0, 1, 0, 2, 0]
    assert owner(outside) is None
    nodes.clear()
    assert owner(first) is None
