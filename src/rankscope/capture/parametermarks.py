"""Marks of frameworks on parameters: plain attributes, read without importing the framework.

* Megatron-core and Transformer Engine mark what is cut over the tensor-parallel ranks with
  `tensor_model_parallel`, `partition_dim` and `partition_stride`. A parameter that has
  `sequence_parallel`, or `tensor_model_parallel = False`, is whole on all of them.
  `allreduce = False` says that it is an expert's, whose axis is another one.
* FSDP1 with `use_orig_params=True` keeps of each parameter a run of its elements on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from rankscope.capture.torch_internals.distributed import group_ranks
from rankscope.capture.torch_internals.parallel import sharded_originals
from rankscope.layout.marks import FSDP1_AXIS, ParameterMark
from rankscope.layout.placement import Placement, PlacementKind

_WHOLE: Final = Placement(kind=PlacementKind.REPLICATE)
_RUN: Final = Placement(kind=PlacementKind.SHARD, dim=0)


class ParameterMarks:
    """The marks of the parameters of some modules. Runs no code of the program's."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._flat: dict[int, ParameterMark] = {}
        """By identity of the parameter."""
        for parameter, group in sharded_originals(modules):
            members = group_ranks(group)
            if members is not None:
                mark = ParameterMark(axis=FSDP1_AXIS, placement=_RUN, members=members)
                self._flat[id(parameter)] = mark

    def of(self, module: torch.nn.Module, parameter: torch.Tensor) -> ParameterMark | None:
        """Return what stands on a parameter of this module, None where nothing does."""
        return self._flat.get(id(parameter)) or _megatron(module, parameter)


def _megatron(module: torch.nn.Module, parameter: torch.Tensor) -> ParameterMark | None:
    own: dict[str, Any] = getattr(parameter, "__dict__", {})
    is_cut = own.get("tensor_model_parallel")
    is_expert = own.get("allreduce") is False
    if is_cut is True:
        placement = _cut(own.get("partition_dim"), own.get("partition_stride", 1), parameter.dim())
    elif is_expert or (is_cut is not False and not isinstance(own.get("sequence_parallel"), bool)):
        return None
    else:
        placement = _WHOLE
    if placement is None:
        return None
    members = None
    group = module.__dict__.get("tp_group")
    if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        members = group_ranks(group)
    return ParameterMark(axis="etp" if is_expert else "tp", placement=placement, members=members)


def _cut(dim: object, stride: object, dims: int) -> Placement | None:
    """Return the placement of a cut along a dim, in `stride` blocks each of which is cut."""
    if type(dim) is not int or type(stride) is not int or not 0 <= dim < dims or stride < 1:
        return None
    if stride == 1:
        return Placement(kind=PlacementKind.SHARD, dim=dim)
    return Placement(kind=PlacementKind.STRIDED_SHARD, dim=dim, split_factor=stride)
