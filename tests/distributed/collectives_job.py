"""Every collective of torch, once a module, on values that rank and world size alone decide."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import rankscope

Value = torch.Tensor
Values = list[Value]
SIZE = 8


def own(rank: int, start: int = 0) -> Value:
    """What a rank hands in."""
    return torch.arange(float(SIZE)) + 10 * rank + start


def total(world: int, start: int = 0) -> Value:
    return torch.stack([own(rank, start) for rank in range(world)]).sum(0)


def parts(value: Value, world: int) -> Values:
    return [part.clone() for part in value.chunk(world)]


def sent_to(rank: int, world: int) -> Value:
    """What all ranks together send to one."""
    return torch.cat([parts(own(peer), world)[rank] for peer in range(world)])


def before(rank: int) -> int:
    return (rank - 1) % dist.get_world_size()


def after(rank: int) -> int:
    return (rank + 1) % dist.get_world_size()


@dataclass(frozen=True)
class Case:
    """One call: how it is made, and what it takes and gives on a rank of a world."""

    run: Callable[[int, int, bool], Any]
    """Of rank, world size and whether it is asynchronous; returns works, or tensors to wait for."""
    op: str
    takes: Callable[[int, int], Values]
    gives: Callable[[int, int], Values | None]
    """None where what a rank gets is not defined."""
    facts: dict[str, Any]
    can_wait: bool = True
    """It has an asynchronous form."""


def _all_reduce(rank: int, world: int, later: bool) -> Any:
    return dist.all_reduce(own(rank), async_op=later)


def _greatest(rank: int, world: int, later: bool) -> Any:
    return dist.all_reduce(own(rank), dist.ReduceOp.MAX, async_op=later)


def _broadcast(rank: int, world: int, later: bool) -> Any:
    return dist.broadcast(own(rank), src=1, async_op=later)


def _reduce(rank: int, world: int, later: bool) -> Any:
    return dist.reduce(own(rank), dst=1, async_op=later)


def _all_gather(rank: int, world: int, later: bool) -> Any:
    return dist.all_gather([torch.zeros(SIZE) for _ in range(world)], own(rank), async_op=later)


def _all_gather_into(rank: int, world: int, later: bool) -> Any:
    return dist.all_gather_into_tensor(torch.zeros(SIZE * world), own(rank), async_op=later)


def _reduce_scatter(rank: int, world: int, later: bool) -> Any:
    out = torch.zeros(SIZE // world)
    return dist.reduce_scatter(out, parts(own(rank), world), async_op=later)


def _reduce_scatter_tensor(rank: int, world: int, later: bool) -> Any:
    return dist.reduce_scatter_tensor(torch.zeros(SIZE // world), own(rank), async_op=later)


def _all_to_all_single(rank: int, world: int, later: bool) -> Any:
    return dist.all_to_all_single(torch.zeros(SIZE), own(rank), async_op=later)


def _gather(rank: int, world: int, later: bool) -> Any:
    found = [torch.zeros(SIZE) for _ in range(world)] if rank == 1 else None
    return dist.gather(own(rank), found, dst=1, async_op=later)


def _coalesced_without_wrapper(value: Value, world: int) -> Values:
    group = dist.group.WORLD.group_name
    made: Values = torch.ops._c10d_functional.all_reduce_coalesced([value], "sum", group)
    return made


def _scatter(rank: int, world: int, later: bool) -> Any:
    given = parts(own(rank), world) if rank == 1 else None
    return dist.scatter(torch.zeros(SIZE // world), given, src=1, async_op=later)


def _coalesced(rank: int, world: int, later: bool) -> Any:
    return dist.all_reduce_coalesced([own(rank), own(rank, 1)], async_op=later)


def _gathers_coalesced(rank: int, world: int, later: bool) -> Any:
    outs = [torch.zeros(SIZE * world) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=later) as manager:
        for out, start in zip(outs, (0, 1)):
            dist.all_gather_into_tensor(out, own(rank, start))
    return manager if later else None


def _barrier(rank: int, world: int, later: bool) -> Any:
    return dist.barrier(async_op=later)


def _funcol(collective: Callable[[Value, int], Any]) -> Callable[[int, int, bool], Any]:
    return lambda rank, world, later: collective(own(rank), world)


def _functional(op: str, gives: Callable[[int, int], Values], call: Any, **facts: Any) -> Case:
    return Case(_funcol(call), op, lambda r, w: [own(r)], gives, {"async": True, **facts}, False)


def one(rank: int, world: int) -> Values:
    return [own(rank)]


def two(rank: int, world: int) -> Values:
    return [own(rank), own(rank, 1)]


SUM = {"reduce": "sum"}
WORLD = dist.GroupMember
CASES: dict[str, Case] = {
    "all_reduce": Case(_all_reduce, "all_reduce", one, lambda r, w: [total(w)], SUM),
    "greatest": Case(_greatest, "all_reduce", one, lambda r, w: [own(w - 1)], {"reduce": "max"}),
    "broadcast": Case(_broadcast, "broadcast", one, lambda r, w: [own(1)], {"src": 1}),
    "reduce": Case(
        _reduce, "reduce", one, lambda r, w: [total(w)] if r == 1 else None, {**SUM, "dst": 1}
    ),
    "all_gather": Case(_all_gather, "all_gather", one, lambda r, w: [own(p) for p in range(w)], {}),
    "all_gather_into": Case(
        _all_gather_into, "all_gather_into_tensor", one,
        lambda r, w: [torch.cat([own(p) for p in range(w)])], {},
    ),
    "reduce_scatter": Case(
        _reduce_scatter, "reduce_scatter", lambda r, w: parts(own(r), w),
        lambda r, w: [parts(total(w), w)[r]], SUM,
    ),
    "reduce_scatter_tensor": Case(
        _reduce_scatter_tensor, "reduce_scatter_tensor", one,
        lambda r, w: [parts(total(w), w)[r]], SUM,
    ),
    "all_to_all_single": Case(
        _all_to_all_single, "all_to_all_single", one, lambda r, w: [sent_to(r, w)], {}
    ),
    "gather": Case(
        _gather, "gather", one, lambda r, w: [own(p) for p in range(w)] if r == 1 else [],
        {"dst": 1},
    ),
    "scatter": Case(
        _scatter, "scatter", lambda r, w: parts(own(1), w) if r == 1 else [],
        lambda r, w: [parts(own(1), w)[r]], {"src": 1},
    ),
    "coalesced": Case(
        _coalesced, "all_reduce_coalesced", two, lambda r, w: [total(w), total(w, 1)], SUM
    ),
    "gathers_coalesced": Case(
        _gathers_coalesced, "all_gather_into_tensor_coalesced", two,
        lambda r, w: [torch.cat([own(p, s) for p in range(w)]) for s in (0, 1)], {},
    ),
    "barrier": Case(_barrier, "barrier", lambda r, w: [], lambda r, w: [], {}),
    "f_all_reduce": _functional(
        "all_reduce", lambda r, w: [total(w)],
        lambda x, w: funcol.all_reduce(x, "SUM", dist.group.WORLD), **SUM,
    ),
    "f_broadcast": _functional(
        "broadcast", lambda r, w: [own(1)],
        lambda x, w: funcol.broadcast(x, 1, dist.group.WORLD), src=1,
    ),
    "f_all_gather": _functional(
        "all_gather_into_tensor", lambda r, w: [torch.cat([own(p) for p in range(w)])],
        lambda x, w: funcol.all_gather_tensor(x, 0, dist.group.WORLD),
    ),
    "f_reduce_scatter": _functional(
        "reduce_scatter_tensor", lambda r, w: [parts(total(w), w)[r]],
        lambda x, w: funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD), **SUM,
    ),
    "f_all_to_all": _functional(
        "all_to_all_single", lambda r, w: [sent_to(r, w)],
        lambda x, w: funcol.all_to_all_single(x, None, None, dist.group.WORLD),
    ),
    "f_coalesced": _functional(
        "all_reduce_coalesced", lambda r, w: [total(w)],
        lambda x, w: funcol.all_reduce_coalesced([x], "sum", dist.group.WORLD), **SUM,
    ),
    "f_raw": _functional(
        "all_reduce_coalesced", lambda r, w: [total(w)], _coalesced_without_wrapper, **SUM
    ),
}  # fmt: skip
ORDER = [
    (name, later) for name, case in CASES.items() for later in (False, *[True] * case.can_wait)
]
"""What `run_all` issues, in this order, each in the module `calls.N`."""


class Call(nn.Module):
    """Makes one call and, where it is asynchronous, waits for it."""

    def __init__(self, name: str, later: bool) -> None:
        super().__init__()
        self.name, self.later = name, later

    def forward(self) -> None:
        found = CASES[self.name].run(dist.get_rank(), dist.get_world_size(), self.later)
        if isinstance(found, torch.Tensor):
            funcol.wait_tensor(found)
        elif isinstance(found, list) and hasattr(funcol, "wait_tensors"):  # torch 2.15
            funcol.wait_tensors(found)
        elif isinstance(found, list):
            for tensor in found:
                funcol.wait_tensor(tensor)
        elif found is not None:
            found.wait()


class Calls(nn.Module):
    """All of them, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls = nn.ModuleList(Call(name, later) for name, later in ORDER)

    def forward(self) -> None:
        for call in self.calls:
            call()


def run_all(folder: str) -> list[str]:
    """Issue every collective under a trace; return what stands on torch's classes afterwards that
    did not before.
    """
    warnings.simplefilter("ignore")
    standing = on_torch()
    with rankscope.trace(out=Path(folder) / "trace", steps="all"), torch.no_grad():
        Calls()()
    return [name for name, value in on_torch().items() if standing[name] is not value]


OPERATORS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")


def on_torch() -> dict[str, Any]:
    """Return by name what stands where collectives are watched."""
    classes = (dist.ProcessGroup, dist.Work, torch._C.Future)
    found = {f"{kind.__name__}.{n}": v for kind in classes for n, v in vars(kind).items()}
    for name in OPERATORS:
        found[name] = getattr(torch.ops._c10d_functional, name)._op
    return found


# ---------------------------------------------------------------- between two ranks, in groups


class Ring(nn.Module):
    """Every rank sends to the next: one by one, at once, and as a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None:
        rank, got = dist.get_rank(), torch.zeros(SIZE)
        if rank % 2:
            dist.recv(got, src=before(rank), tag=3)
            dist.send(own(rank), dst=after(rank), tag=3)
        else:
            dist.send(own(rank), dst=after(rank), tag=3)
            dist.recv(got, src=before(rank), tag=3)
        works = [dist.isend(own(rank, 1), after(rank)), dist.irecv(got, before(rank))]
        for work in works:
            work.wait()
        pairs = [
            dist.P2POp(dist.isend, own(rank, 2), np.int64(after(rank))),  # torch takes numpy's too
            dist.P2POp(dist.irecv, torch.zeros(SIZE), before(rank)),
        ]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        if rank == 0:
            dist.send(own(0, 3), dst=1)
        elif rank == 1:
            dist.recv(got)


class Halves(nn.Module):
    """An all_reduce within each half of the world, and objects over all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        world = dist.get_world_size()
        self.halves = [
            dist.new_group(list(part)) for part in (range(world // 2), range(world // 2, world))
        ]

    def forward(self) -> None:
        mine = self.halves[dist.get_rank() * 2 // dist.get_world_size()]
        dist.all_reduce(own(dist.get_rank()), group=mine)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {"rank": dist.get_rank()})
        dist.broadcast_object_list(found, src=0)


def run_pairs(folder: str) -> None:
    with rankscope.trace(out=Path(folder) / "trace", steps="all"), torch.no_grad():
        Ring()()


def run_groups(folder: str) -> None:
    halves = Halves()
    with rankscope.trace(out=Path(folder) / "trace", steps="all"), torch.no_grad():
        halves()


# ---------------------------------------------------------------- what nobody waits for, what fails


class Careless(nn.Module):
    """Starts what nobody waits for inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.works: list[Any] = []

    def forward(self) -> Value:
        value = own(dist.get_rank())
        self.works.append((dist.all_reduce(value, async_op=True), value))
        return value


def run_careless(folder: str) -> list[float]:
    model = Careless()
    with rankscope.trace(out=Path(folder) / "trace", steps="all"), torch.no_grad():
        model()
    (work, value) = model.works.pop()
    work.wait()
    return value.tolist()


class IntoOne(nn.Module):
    """Receives twice into one tensor before it waits, as stages of torch up to 2.10 greet their
    neighbours, and twice into the halves of another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None:
        got = torch.zeros(3 * SIZE)
        places = [got[:SIZE], got[:SIZE], got[SIZE : 2 * SIZE], got[2 * SIZE :]]
        works: list[Any] = []
        for tag, place in enumerate(places):
            if dist.get_rank():
                works.append(dist.irecv(place, 0, tag=tag))
            else:
                works.append(dist.isend(own(0, tag), 1, tag=tag))
        for work in works:
            work.wait()


def run_into_one(folder: str) -> None:
    with rankscope.trace(out=Path(folder) / "trace", steps="all"), torch.no_grad():
        IntoOne()()


class Mistaken(nn.Module):
    """Asks for what gloo refuses: to gather into tensors of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None:
        found = [torch.zeros(SIZE + 1) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own(dist.get_rank()))


def run_mistaken(folder: str) -> list[str]:
    """Return what the program sees of its mistake, untraced and traced."""
    said = []
    for is_traced in (False, True):
        try:
            if is_traced:
                with rankscope.trace(out=Path(folder) / "trace", steps="all"), torch.no_grad():
                    Mistaken()()
            else:
                with torch.no_grad():
                    Mistaken()()
        except (RuntimeError, ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
