"""Which collective a call of torch's process groups or functional collectives is, over which ranks
and on which tensors. Nothing is issued here, and no tensor is read.

Process groups take each collective in several ways (torch's own functions hand over an object of
options, the methods may be called with a root or a reduction in its place); both are known.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from rankscope.capture.torch_internals.distributed import (
    collectives_issued,
    group_named,
    group_ranks,
)
from rankscope.record.ranks import OPS, Collective

_C10D: Final = "torch.distributed.distributed_c10d"
_BETWEEN: Final = frozenset({_C10D, "torch.distributed.c10d_logger", "typing_extensions"})
"""Modules of the frames between a process group's method and the program."""
_MOST_FRAMES: Final = 16
_OBJECTS: Final = frozenset(
    {
        "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
        "send_object_list", "recv_object_list",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """How a call names its tensors (positions, None for none), and its parameters as keywords."""

    op: str
    outputs: int | None
    inputs: int | None
    names: tuple[str, ...]
    extra: int
    """Position of the options, or of the root or reduction that stands in their place."""
    root: str = ""


_IN_PLACE = ("tensors",)
_BASE = ("output", "input")
_LISTS = ("output_tensors", "input_tensors")
_SCATTERED = ("outputTensor", "inputTensor")
_COALESCED = ("outputs", "inputs")
_SPLIT = (*_BASE, "output_split_sizes", "input_split_sizes")

METHODS: Final[dict[str, Form]] = {
    "allreduce": Form("all_reduce", 0, 0, _IN_PLACE, 1),
    "allreduce_coalesced": Form("all_reduce_coalesced", 0, 0, _IN_PLACE, 1),
    "broadcast": Form("broadcast", 0, 0, _IN_PLACE, 1, "src"),
    "reduce": Form("reduce", 0, 0, _IN_PLACE, 1, "dst"),
    "allgather": Form("all_gather", 0, 1, _LISTS, 2),
    "allgather_coalesced": Form("all_gather_coalesced", 0, 1, ("output_lists", "input_list"), 2),
    "all_gather_single": Form("all_gather_into_tensor", 0, 1, _BASE, 2),
    "_allgather_base": Form("all_gather_into_tensor", 0, 1, _BASE, 2),
    "all_gather_single_coalesced": Form("all_gather_into_tensor_coalesced", 0, 1, _COALESCED, 2),
    "allgather_into_tensor_coalesced": Form(
        "all_gather_into_tensor_coalesced", 0, 1, _COALESCED, 2
    ),
    "gather": Form("gather", 0, 1, _LISTS, 2, "dst"),
    "gather_single": Form("gather_into_tensor", 0, 1, _BASE, 2, "dst"),
    "gather_into_tensor": Form("gather_into_tensor", 0, 1, _BASE, 2, "dst"),
    "scatter": Form("scatter", 0, 1, _LISTS, 2, "src"),
    "reduce_scatter": Form("reduce_scatter", 0, 1, _LISTS, 2),
    "reduce_scatter_single": Form("reduce_scatter_tensor", 0, 1, _SCATTERED, 2),
    "_reduce_scatter_base": Form("reduce_scatter_tensor", 0, 1, _SCATTERED, 2),
    "reduce_scatter_single_coalesced": Form("reduce_scatter_tensor_coalesced", 0, 1, _COALESCED, 2),
    "reduce_scatter_tensor_coalesced": Form("reduce_scatter_tensor_coalesced", 0, 1, _COALESCED, 2),
    "alltoall": Form("all_to_all", 0, 1, _LISTS, 2),
    "all_to_all_single": Form("all_to_all_single", 0, 1, _SPLIT, 4),
    "alltoall_base": Form("all_to_all_single", 0, 1, _SPLIT, 4),
    "barrier": Form("barrier", None, None, (), 0),
    "monitored_barrier": Form("monitored_barrier", None, None, (), 0),
    "send": Form("send", None, 0, ("tensors", "dstRank", "tag"), 3, "peer"),
    "recv": Form("recv", 0, None, ("tensors", "srcRank", "tag"), 3, "peer"),
    "recv_anysource": Form("recv", 0, None, ("tensors", "tag"), 2, "peer"),
}

_FUNCTIONAL_NAMES: Final = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    *("broadcast", "broadcast_", "all_gather_into_tensor", "all_gather_into_tensor_out"),
    *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_out"),
    *("reduce_scatter_tensor_coalesced", "all_to_all_single"),
)
FUNCTIONAL: Final[dict[tuple[str, str], str]] = {
    ("_c10d_functional", name): name.removesuffix("_out").removesuffix("_")
    for name in _FUNCTIONAL_NAMES
} | {("_dtensor", "shard_dim_alltoall"): "all_to_all_single"}
"""Operators behind functional collectives, by namespace and name: the last text argument is the
group, the one before it (if any) the reduction."""


class CallOrigin(NamedTuple):
    """Origin of a call: one of `record.collective.ISSUERS`, and the program's line that made it."""

    issuer: str
    at: str


@dataclass(frozen=True, slots=True)
class IssuedCall:
    """One call, read before it runs."""

    collective: Collective
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    """What the call writes; empty for a functional collective until it has returned."""
    number: int
    """The call's place in its group by torch's own count, from 1; 0 where torch gives none."""


class Groups:
    """Names and members of process groups, each looked up once; keeps none alive."""

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[weakref.ref[Any], str, tuple[int, ...]]] = {}

    def find(self, group: Any) -> tuple[str, tuple[int, ...]]:
        """Return a group's name and global ranks, in its own order."""
        entry = self._by_identity.get(id(group))
        if entry is not None and entry[0]() is group:
            return entry[1], entry[2]
        members = group_ranks(group)
        if members is None:  # not made by torch's functions: it knows its own numbers only
            members = tuple(range(int(group.size())))
        name = str(group.group_name)
        self._by_identity[id(group)] = weakref.ref(group), name, members
        return name, members


def read_method(
    name: str,
    group: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    groups: Groups,
    where: CallOrigin,
) -> IssuedCall:
    """Return the call of a process group's method (METHODS); `args` follow the group."""
    form = METHODS[name]
    arguments = [*args, *(kwargs[key] for key in form.names[len(args) :] if key in kwargs)]
    # a single tensor in place of a list of them comes under another keyword
    arguments += [kwargs[key] for key in ("tensor", "input_tensor") if key in kwargs]
    extra = kwargs.get("opts", arguments[form.extra] if len(arguments) > form.extra else None)
    group_name, members = groups.find(group)
    reduce = getattr(extra, "reduceOp", None) or kwargs.get("op")
    if reduce is None and form.op in _REDUCING:
        # in the old way the reduction itself stands where the options would
        reduce = _reduction_among(arguments[1:])
    callers = _public_callers()
    is_between_two = form.root == "peer"
    fields: dict[str, Any] = {}
    if form.root:
        root = getattr(extra, "rootRank", None)
        fields[form.root] = _global(
            members, _root_among(name, arguments, kwargs) if root is None else root
        )
    if is_between_two:
        fields["tag"] = int(
            arguments[-1] if name != "send" or len(arguments) > 2 else kwargs["tag"]
        )
        is_async = callers.isdisjoint({"send", "recv"})
    else:
        is_async = bool(getattr(extra, "asyncOp", name != "monitored_barrier"))
    inputs = _tensors(arguments, form.inputs)
    return IssuedCall(
        Collective(
            op=form.op,
            reduce=_reduction(reduce) if form.op in _REDUCING else None,
            group=group_name,
            members=members,
            is_async=is_async,
            is_object=not callers.isdisjoint(_OBJECTS),
            issuer=where.issuer,
            at=where.at,
            **fields,
        ),
        inputs,
        _tensors(arguments, form.outputs),
        0 if is_between_two else _number(group, inputs),
    )


_REDUCING: Final = frozenset(op for op, facts in OPS.items() if "reduce" in facts)


def read_functional(
    op: str, args: Sequence[Any], kwargs: dict[str, Any], groups: Groups, where: CallOrigin
) -> IssuedCall:
    """Return the call of a functional collective's operator `op`, a key of FUNCTIONAL."""
    arguments = [*args, *kwargs.values()]
    texts = [value for value in arguments if isinstance(value, str)]
    group_kinds = (str, torch.distributed.ProcessGroup)
    named = next(value for value in reversed(arguments) if isinstance(value, group_kinds))
    group = group_named(named) if isinstance(named, str) else named
    name, members = groups.find(group)
    src = None
    if op == "broadcast":
        src = _global(members, next(v for v in arguments[1:] if isinstance(v, int)))
    inputs = _tensors(arguments, 0)
    return IssuedCall(
        Collective(
            op=op,
            reduce=texts[0].lower() if op in _REDUCING else None,
            group=name,
            members=members,
            is_async=True,
            src=src,
            issuer=where.issuer,
            at=where.at,
        ),
        inputs,
        (),
        _number(group, inputs),
    )


def unread_call(op: str, where: CallOrigin) -> IssuedCall:
    """Return the entry for a call that could not be read."""
    collective = Collective(op=op, group="", members=(), issuer=where.issuer, at=where.at)
    return IssuedCall(collective, (), (), 0)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tensor, or of lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _tensors(arguments: Sequence[Any], position: int | None) -> tuple[torch.Tensor, ...]:
    if position is None or position >= len(arguments):
        return ()
    return tuple(tensors_in(arguments[position]))


def _number(group: Any, inputs: Sequence[torch.Tensor]) -> int:
    before = collectives_issued(group, inputs[0].device if inputs else None)
    return 0 if before is None else before + 1


def _global(members: tuple[int, ...], rank: int | None) -> int | None:
    """Return the global rank of a group's own number, or the number where the group lacks it."""
    if rank is None:
        return None
    number = int(rank)
    return members[number] if 0 <= number < len(members) else number


def _root_among(name: str, arguments: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    if name == "recv_anysource":
        return -1
    for key in ("root", "dstRank", "srcRank"):
        if key in kwargs:
            return int(kwargs[key])
    return next((int(v) for v in arguments[1:] if isinstance(v, Integral)), None)  # also numpy's


def _reduction_among(arguments: Sequence[Any]) -> Any:
    kinds = (torch.distributed.ReduceOp, torch.distributed.ReduceOp.RedOpType)
    return next((value for value in arguments if isinstance(value, kinds)), None)


def _reduction(reduce: Any) -> str:
    kind = getattr(reduce, "op", reduce)
    return str(getattr(kind, "name", "SUM")).lower()


def _public_callers() -> set[str]:
    """Return the names of torch.distributed's functions between a process group and the program."""
    frame: FrameType | None = sys._getframe(1)
    names = set()
    is_inside = False
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        module = frame.f_globals.get("__name__")
        if module == _C10D:
            names.add(frame.f_code.co_name)
            is_inside = True
        # the first frame of the program: what it called lies behind us
        elif is_inside and module not in _BETWEEN:
            break
        frame = frame.f_back
    return names
