"""Collectives within one process: forms of calls, and what others put over them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankscope
from rankscope.agent.collectives import CollectiveWatch
from rankscope.agent.guard import Guard
from tests.agent.test_collectives import alone as alone
from tests.agent.test_collectives import issued


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
