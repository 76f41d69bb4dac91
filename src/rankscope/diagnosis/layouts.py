"""Which ranks should hold the same of a value, and how that is known.

In falling order of trust: read off DTensors, marked by a framework on its parameters, declared in a
layout file, inferred from what ranks held at setup (`replicas.py`). Nothing else is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.stepview import Array, SlotValues
from rankscope.layout.infer import lines_along
from rankscope.layout.layoutfile import LayoutFile, described_as
from rankscope.layout.placement import Mesh, Placement, PlacementKind

_PLACED: Final = ("dtensor", "marked", "declared")
"""Sources that stand in the trace itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Same:
    """Groups of ranks that should hold the same of one value."""

    groups: tuple[Array, ...]
    """Each sorted, of two ranks or more."""
    source: str
    """"dtensor", "marked", "declared" or "inferred"."""

    @property
    def is_of_its_mesh(self) -> bool:
        """True where nothing is said of ranks outside the value's mesh, or of other axes."""
        return self.source in ("dtensor", "marked")


def sorted_lines(mesh: Mesh, axes: Collection[str]) -> tuple[Array, ...]:
    """Return the sorted ranks along some axes, for every place on the others."""
    return tuple(np.sort(np.array(line, np.int64)) for line in lines_along(mesh, axes))


class Layouts:
    """Placements of values, from the trace and from a layout file."""

    def __init__(self, declared: LayoutFile | None = None, world_size: int = 1) -> None:
        self.declared = declared
        self.mesh = declared.mesh(world_size) if declared is not None and world_size > 1 else None
        self._groups: dict[Any, tuple[Array, ...]] = {}
        self._named: dict[tuple[str, str], Mapping[str, Placement]] = {}

    def same(self, values: SlotValues) -> Same | None:
        """Return who should hold the same; None where no layout describes the value."""
        if values.source in _PLACED:
            return Same(groups=self._recorded(values), source=values.source)
        placements = self.placements(values.call.path, values.slot)
        if not placements or self.mesh is None:
            return None
        key = ("declared", tuple(sorted((a, str(p)) for a, p in placements.items())))
        if key not in self._groups:
            self._groups[key] = _wide(_replicas(self.mesh, placements))
        return Same(groups=self._groups[key], source="declared")

    def placements(self, path: str, slot: str) -> Mapping[str, Placement]:
        """Return what the layout file says of a slot: a gradient lies as its parameter does."""
        if self.declared is None or self.mesh is None:
            return {}
        key = (path, slot)
        if key not in self._named:
            found = self.declared.placements(path, slot)
            if not found and slot.startswith("grad:"):
                found = self.declared.placements(path, described_as(slot))
            self._named[key] = found
        return self._named[key]

    def _recorded(self, values: SlotValues) -> tuple[Array, ...]:
        found: list[Array] = []
        for view in values.views:
            placements = view.placements
            key = (view.mesh_name, tuple(placements.items()))
            if key not in self._groups:
                self._groups[key] = _wide(
                    line for mesh in view.meshes for line in _replicas(mesh, placements)
                )
            if len(values.views) == 1:
                return self._groups[key]
            own = np.array(view.ranks, np.int64)
            found += [g for g in self._groups[key] if np.isin(g, own).all()]
        return tuple(found)


def _replicas(mesh: Mesh, placements: Mapping[str, Placement]) -> tuple[Array, ...]:
    kinds = {axis: placement.kind for axis, placement in placements.items()}
    whole = [axis for axis in mesh.axes if kinds.get(axis) is PlacementKind.REPLICATE]
    return sorted_lines(mesh, whole) if whole else ()


def _wide(groups: Iterable[Array]) -> tuple[Array, ...]:
    return tuple(group for group in groups if len(group) > 1)
