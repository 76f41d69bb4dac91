"""DTensors: what they are made of, how their placements are called, and the ranks of their mesh."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rankscope.capture.torch_internals.loaded import loaded_class
from rankscope.layout.placement import PlacementKind


def is_dtensor(kind: type) -> bool:
    """True for DTensor and its subclasses."""
    dtensor = loaded_class("torch.distributed.tensor", "DTensor")
    return dtensor is not None and issubclass(kind, dtensor)


def dtensor_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return local tensor and spec of a DTensor, past its properties (modes see those)."""
    parts: Any = tensor
    return parts._local_tensor, parts._spec


def placement_class(placement: object) -> str:
    """Return the name of exactly the classes that are read as a kind of placement, else ""."""
    kind = type(placement)
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return ""
    is_torchs = kind.__module__ == "torch.distributed.tensor.placement_types"
    is_read = PlacementKind.of_torch_class(kind.__name__) is not PlacementKind.OTHER
    return kind.__name__ if is_torchs and is_read else ""


def shard_order(spec: object) -> tuple[int, ...] | None:
    """Return the mesh axes in the order in which they cut, None for their own order.

    Newer torch can shard a dim over axes in another order than the mesh's; without the field the
    order is the mesh's. A strided shard says the order itself: torch 2.10 has both for FSDP2 over
    tensor parallelism.
    """
    order = getattr(spec, "shard_order", None)
    if not order or all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order):
        return None
    if any(type(each).__name__ == "_StridedShard" for each in getattr(spec, "placements", ())):
        return None
    return tuple(axis for entry in order for axis in entry.mesh_dims)


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """Return the global ranks of a DeviceMesh in row-major order. Runs torch operations."""
    return tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
