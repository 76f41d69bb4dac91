"""What frameworks say of how a parameter or an activation lies: read off plain attributes, without
importing a framework or running code of the program's (`layout/marks.py` says what is made of
it)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, Final

import torch

from rankscope.capture.invisible import invisible_operations
from rankscope.capture.torch_internals.distributed import group_ranks
from rankscope.capture.torch_internals.dtensor import mesh_ranks, placement_class
from rankscope.capture.torch_internals.loaded import loaded_class
from rankscope.capture.torch_internals.parallel import sharded_originals
from rankscope.layout.marks import FSDP1_AXIS, LayoutMark
from rankscope.layout.placement import Placement, PlacementKind

_WHOLE: Final = Placement(kind=PlacementKind.REPLICATE)
_RUN: Final = Placement(kind=PlacementKind.SHARD, dim=0)


class ParameterMarks:
    """Marks of frameworks on the parameters of some modules.

    * Megatron-core and Transformer Engine mark what is cut over the tensor-parallel ranks with
      `tensor_model_parallel`, `partition_dim` and `partition_stride`. A parameter that has
      `sequence_parallel`, or `tensor_model_parallel = False`, is whole on all of them.
      `allreduce = False` marks an expert's, whose axis is another one.
    * FSDP1 with `use_orig_params=True` keeps of each parameter a run of its elements on each rank.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._flat: dict[int, LayoutMark] = {}
        for parameter, group in sharded_originals(modules):
            members = group_ranks(group)
            if members is not None:
                mark = LayoutMark(axis=FSDP1_AXIS, placement=_RUN, members=members)
                self._flat[id(parameter)] = mark

    def of(self, module: torch.nn.Module, parameter: torch.Tensor) -> LayoutMark | None:
        """Return what stands on a parameter of this module, None where nothing does."""
        return self._flat.get(id(parameter)) or _megatron(module, parameter)


def _megatron(module: torch.nn.Module, parameter: torch.Tensor) -> LayoutMark | None:
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
    return LayoutMark(axis="etp" if is_expert else "tp", placement=placement, members=members)


def _cut(dim: object, stride: object, dims: int) -> Placement | None:
    """Return the placement of a cut along a dim, in `stride` blocks each of which is cut."""
    if type(dim) is not int or type(stride) is not int or not 0 <= dim < dims or stride < 1:
        return None
    if stride == 1:
        return Placement(kind=PlacementKind.SHARD, dim=dim)
    return Placement(kind=PlacementKind.STRIDED_SHARD, dim=dim, split_factor=stride)


_TP_STYLES: Final = "transformers.distributed.tensor_parallel"
_OF_STYLE: Final[dict[str, dict[str, str]]] = {
    "ColwiseParallel": {"input.0": "input_layouts", "output": "output_layouts"},
    "RowwiseParallel": {"input.0": "input_layouts", "output": "output_layouts"},
    "EmbeddingParallel": {"input.0": "", "output": ""},
    "AllReduceParallel": {"output": ""},
}
"""{class of transformers: {slot: its attribute that says how that lies, "" where it is whole}}.
The other classes leave it to the module how values lie."""


def activation_marks(module: torch.nn.Module) -> Iterator[tuple[str, LayoutMark]]:
    """Yield what transformers' `tp_plan` says of the first input of a module and of its output,
    each with the name of its slot.

    Where the plan is applied, it replaces the `forward` of the module: what a call is handed and
    hands out is what the style says. Style and mesh are read where the new `forward` has them: they
    are those that were applied, whatever the plan says. An older transformers hooks the module
    instead: nothing is yielded, because a value may be read before its hook.
    """
    theirs = getattr(sys.modules.get(_TP_STYLES), "__dict__", {})
    forward = module.__dict__.get("forward")
    if type(forward) is not FunctionType or forward.__globals__ is not theirs:
        return
    try:
        inside = [cell.cell_contents for cell in forward.__closure__ or ()]
    except ValueError:  # a cell is empty
        return
    held: dict[str, Any] = dict(zip(forward.__code__.co_freevars, inside))
    style: Any = held.get("self")
    mesh: Any = held.get("mesh")
    slots = next((own for name, own in _OF_STYLE.items() if theirs.get(name) is type(style)), {})
    is_mesh = type(mesh) is loaded_class("torch.distributed.device_mesh", "DeviceMesh")
    if not slots or not is_mesh or mesh.ndim != 1:
        return
    with invisible_operations():
        members = mesh_ranks(mesh)
    axis = str((mesh.mesh_dim_names or ("tp",))[0])
    for slot, attribute in slots.items():
        said: Any = style.__dict__.get(attribute)
        kind = placement_class(said) if attribute else "Replicate"
        is_last = kind == "Shard" and said.dim == -1
        if kind == "Replicate":
            placement = _WHOLE
        elif kind == "Shard" and type(said.dim) is int and said.dim >= -1:
            placement = Placement(kind=PlacementKind.SHARD, dim=max(said.dim, 0))
        else:
            continue
        mark = LayoutMark(axis=axis, placement=placement, is_of_last_dim=is_last, members=members)
        yield slot, mark
