"""Collectives within one process: which settings take them, what stands on torch and when, and the
spans of autograd nodes by which backward finds its module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.agent.collectives import CollectiveWatch
from rankscope.agent.guard import Guard
from rankscope.agent.hooks.calls import NodeMap, OpenCall, Scope
from rankscope.agent.hooks.modules import ModuleTable
from rankscope.capture.collectives import FUNCTIONAL, METHODS
from rankscope.record.call import Mode
from rankscope.record.collective import OPS
from rankscope.record.phases import Phase
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


class Direct(nn.Module):
    """Calls a process group's own methods, in the forms that torch's functions do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None:
        group, x, out = dist.group.WORLD, torch.arange(4.0), torch.zeros(4)
        assert group is not None
        works = [
            group.allreduce(x),
            group.allreduce([x], dist.ReduceOp.MAX),
            group.allreduce(tensor=x, op=dist.ReduceOp.MIN),
            group.broadcast(x, 0),
            group.reduce(tensor=x, root=0, op=dist.ReduceOp.MAX),
            group.allgather([out], x),
            group.barrier(),
        ]
        for work in works:
            work.wait()


@pytest.mark.usefixtures("alone")
def test_a_process_groups_own_methods_are_understood_in_all_their_forms(tmp_path: Path) -> None:
    with rankscope.trace(out=tmp_path / "trace", steps="all") as handle, torch.no_grad():
        Direct()()
    found = handle.open()
    assert not [n.errors for n in found.walk() if n.errors]
    facts = [node.collectives[0][1] for node in issued(found)]
    assert [(f["op"], f.get("reduce"), f.get("src", f.get("dst"))) for f in facts] == [
        ("all_reduce", "sum", None),
        ("all_reduce", "max", None),
        ("all_reduce", "min", None),
        ("broadcast", None, 0),
        ("reduce", "max", 0),
        ("all_gather", None, None),
        ("barrier", None, None),
    ]
    assert all(f["async"] for f in facts)
    slots = [[slot.slot for slot in node.slots] for node in issued(found)]
    assert slots == [["input.0", "output.0"]] * 6 + [[]]


class Nameless(nn.Module):
    """Calls a process group that does not know its name, as one of a new torch, then another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None:
        with contextlib.suppress(RuntimeError):
            dist.ProcessGroup(0, 1).allreduce(torch.ones(2))  # it has no backend either
        dist.all_reduce(torch.ones(2))


@pytest.mark.usefixtures("alone")
def test_a_call_that_cannot_be_read_is_recorded_as_one_of_an_unknown_group(tmp_path: Path) -> None:
    """Left out, it would shift the numbers of what follows on this rank."""
    with rankscope.trace(out=tmp_path / "trace", steps="all") as handle, torch.no_grad():
        Nameless()()
    found = handle.open()
    facts = [node.collectives[0][1] for node in issued(found)]
    assert [(f["op"], f["group"], f["members"]) for f in facts] == [
        ("all_reduce", "", []),
        ("all_reduce", "0", [0]),
    ]
    assert any("ProcessGroup name not set" in str(node.errors) for node in found.walk())
    (note,) = (n for n in rankscope.check(found).notes if n.startswith("not judged"))
    assert "rank 0, because 1 collective names no group" in note


class GatheringInto(nn.Module):
    """Gathers into one tensor, as NCCL can; gloo refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None:
        with pytest.raises(RuntimeError, match="does not support gather_single"):
            dist.gather_single(torch.ones(4), torch.zeros(4), dst=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch before 2.15 has no such call")
def test_a_gather_into_one_tensor_is_a_collective(tmp_path: Path) -> None:
    with rankscope.trace(out=tmp_path / "trace", steps="all") as handle, torch.no_grad():
        GatheringInto()()
    (node,) = issued(handle.open())
    facts = node.collectives[0][1]
    assert (facts["op"], facts["dst"], node.status) == ("gather_into_tensor", 0, "raised")
    assert [slot.slot for slot in node.slots] == ["input.0"]


def test_every_op_that_is_recorded_is_one_that_rules_know() -> None:
    """Else a report would call an op of today unknown, and leave its collectives unjudged."""
    assert {form.op for form in METHODS.values()} | {*FUNCTIONAL.values()} == OPS.keys()
    assert all(form.root in OPS[form.op] for form in METHODS.values() if form.root)


class Listener:
    """Counts what it is told."""

    def __init__(self, *, fails: bool = False) -> None:
        self.told: list[str] = []
        self._fails = fails

    def begins(self, told: Any, name: str, *rest: Any) -> None:
        self.told.append(name)
        if self._fails:
            raise RuntimeError("ours")

    def ends(self, told: Any, result: Any) -> None: ...

    def fails(self, told: Any, error: Any) -> None: ...

    def derives(self, work: Any, future: Any) -> None: ...

    def waits(self, told: Any, work: Any) -> None: ...


@pytest.mark.usefixtures("alone")
def test_what_others_put_over_ours_stays_and_ours_below_only_passes_on() -> None:
    kept = vars(dist.ProcessGroup)["allreduce"]
    listener = Listener()
    watch = CollectiveWatch(Guard(lambda error: None), listener)
    watch.install()
    ours = dist.ProcessGroup.allreduce
    calls = []

    def theirs(group: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(group)
        return ours(group, *args, **kwargs)

    dist.ProcessGroup.allreduce = theirs
    try:
        watch.uninstall()
        assert dist.ProcessGroup.allreduce is theirs
        x = torch.ones(2)
        dist.all_reduce(x)
        assert len(calls) == 1 and not listener.told
    finally:
        dist.ProcessGroup.allreduce = kept


@pytest.mark.usefixtures("alone")
def test_a_failure_of_ours_leaves_the_collective_as_it_was() -> None:
    failures: list[Exception] = []
    watch = CollectiveWatch(Guard(failures.append), Listener(fails=True))
    x = torch.arange(3.0)
    watch.install()
    try:
        dist.all_reduce(x)
        work = dist.broadcast(x, 0, async_op=True)
        assert type(work) is dist.Work
        work.wait()
    finally:
        watch.uninstall()
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert [str(error) for error in failures] == ["ours"] * 2


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
