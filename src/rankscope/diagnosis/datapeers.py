"""Which ranks worked on the same data, and along which axes they should not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.layouts import lines_along
from rankscope.diagnosis.stepview import CallView, SlotValues, StepView
from rankscope.layout.placement import parse_placement
from rankscope.record.call import Phase

__all__ = ["data_lines", "fsdp_axes", "root_calls", "same_inputs"]

Array = NDArray[Any]
_DATA: Final = re.compile(r"(^|_)(dp|ddp|data|fsdp|hsdp|replicate|shard)(_|\d|$)")

_NO_DATA: Final = re.compile(
    r"(^|_)(tp|sp|cp|pp|ep|tensor|sequence|seq|context|pipe|expert)(_|\d|$)"
)


def root_calls(moment: StepView) -> Iterator[CallView]:
    """Yield the outermost forward calls."""
    return (call for call in moment.of(Phase.FORWARD) if call.parent is None)


def same_inputs(moment: StepView) -> tuple[Array, ...]:
    """Return the groups of two ranks or more that were handed bitwise the same root inputs in every
    micro-batch of the step, in calls they made together.

    Their activations may be compared; those of any other ranks may not.
    """
    roots = list(root_calls(moment))
    if not roots:
        return ()
    size = 1 + max(int(call.ranks[-1]) for call in roots)
    keys: list[list[int]] = [[] for _ in range(size)]
    for number, call in enumerate(roots):
        for held in call.inputs:
            for rank, own, known in zip(
                held.ranks.tolist(), held.hashes.tolist(), held.is_known.tolist()
            ):
                keys[rank] += (number, own if known else -1 - rank)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(keys):
        if key:
            groups.setdefault(tuple(key), []).append(rank)
    return tuple(np.array(g, np.int64) for g in groups.values() if len(g) > 1)


def data_lines(moment: StepView, scene: CheckContext) -> dict[str, tuple[Array, ...]]:
    """Return {what says so: lines of ranks} of the axes along which batches should differ.

    Such an axis is one that a layout file or a mesh of FSDP's parameters names so (dp, data, fsdp
    ...), one along which FSDP cut every parameter, or all replicas of a DDP model.
    """
    life = scene.life(moment.incarnation)
    found: dict[str, tuple[Array, ...]] = {}
    declared = scene.layouts.mesh
    if declared is not None:
        for axis, name in enumerate(declared.axes):
            if _DATA.search(name.lower()) and declared.shape[axis] > 1:
                found[f"declared axis {name}"] = lines_along(declared, [axis])
    if "FSDP2" in life.wrappers:
        for name, lines in life.data_axes.items():
            found.setdefault(f"FSDP's axis {name}", lines)
    if "DDP" in life.wrappers and life.replicas.lines:
        found.setdefault("DDP", life.replicas.lines)
    return found


def fsdp_axes(setup: StepView) -> dict[str, tuple[Array, ...]]:
    """Return {axis: its lines} of the mesh axes that are named as data axes, or are a mesh's only
    axis, along which every DTensor parameter is cut (and are not named as anything else)."""
    placed: dict[tuple[str, str], list[bool]] = {}
    lines: dict[tuple[str, str], tuple[Array, ...]] = {}
    for held in setup.values(Phase.SETUP):
        if held.slot.startswith("param:") and held.source == "dtensor":
            _read_axes(held, placed, lines)
    return {
        name: lines[mesh, name]
        for (mesh, name), cuts in placed.items()
        if _DATA.search(name.lower())
        or (all(cuts) and "," not in mesh and not _NO_DATA.search(name.lower()))
    }


def _read_axes(
    held: SlotValues,
    placed: dict[tuple[str, str], list[bool]],
    lines: dict[tuple[str, str], tuple[Array, ...]],
) -> None:
    view = held.views[0]
    mesh_name = str(view.data["layout"].get("mesh", ""))
    for name, text in view.placements.items():
        key = (mesh_name, name)
        placed.setdefault(key, []).append(parse_placement(text).dim is not None)
        if key not in lines:
            lines[key] = tuple(
                line
                for mesh in view.meshes
                for line in lines_along(mesh, [mesh.axes.index(name)])
                if len(line) > 1
            )
