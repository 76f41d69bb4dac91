"""Process groups and meshes of the job, read off torch's tables: no collective, no store."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from rankscope.capture.invisible import invisible_operations
from rankscope.capture.torch_internals.distributed import default_groups
from rankscope.capture.torch_internals.dtensor import mesh_ranks
from rankscope.layout.placement import Mesh
from rankscope.record.streams import ProcessGroup


def process_groups() -> tuple[ProcessGroup, ...]:
    """Return every process group this rank has built, the default group first."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ()
    groups = [
        ProcessGroup(
            name=name,
            ranks=tuple(ranks),
            backend=backend,
            description=str(getattr(group, "group_desc", "")),
        )
        for group, name, ranks, backend in default_groups()
    ]
    return tuple(groups)


class MeshTable:
    """The meshes seen so far. It keeps none alive: a mesh holds process groups."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int, Mesh]] = {}
        self._numbers: dict[Mesh, int] = {}

    def find(self, device_mesh: Any) -> tuple[int, Mesh]:
        """Return a number that stands for this mesh, and its record. Equal meshes share both."""
        known = self._known.get(id(device_mesh))
        if known is not None and known[0]() is device_mesh:
            return known[1], known[2]
        with invisible_operations():
            ranks = mesh_ranks(device_mesh)
        shape = tuple(int(size) for size in device_mesh.shape)
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(shape)))
        mesh = Mesh(axes=tuple(str(name) for name in names), shape=shape, ranks=ranks)
        number = self._numbers.setdefault(mesh, len(self._numbers) + 1)
        self._known[id(device_mesh)] = weakref.ref(device_mesh), number, mesh
        return number, mesh
