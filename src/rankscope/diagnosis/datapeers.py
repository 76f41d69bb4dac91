"""Which ranks worked on the same data, and along which axes they should not have."""

from __future__ import annotations

from typing import Final

from rankscope.diagnosis.replicas import InferredReplicas, Layouts, sorted_lines
from rankscope.diagnosis.stepview import Array, StepView, root_of
from rankscope.layout.infer import AxisName, is_fsdp_axis, named_as
from rankscope.layout.placement import Mesh, Placement
from rankscope.record.phases import Phase

DDP: Final = "DDP"
"""The word for `DistributedDataParallel` among the wrappers of a module."""


def data_lines(
    setup: StepView | None, layouts: Layouts, replicas: InferredReplicas
) -> dict[str, tuple[Array, ...]]:
    """Return {what says so: lines of ranks} of the axes along which batches should differ.

    Such an axis is one that a layout file or a mesh of FSDP's parameters names so (dp, data, fsdp
    ...), one along which FSDP cut every parameter, or all replicas of a DDP model or of one whose
    parameters are marked as cut along other axes. Where the trace has no setup, layouts alone tell.
    """
    found: dict[str, tuple[Array, ...]] = {}
    declared = layouts.mesh
    if declared is not None:
        for name, extent in zip(declared.axes, declared.shape):
            if named_as(name) is AxisName.DATA and extent > 1:
                found[f"declared axis {name}"] = sorted_lines(declared, [name])
    if setup is not None and "FSDP2" in replicas.wrappers:
        for name, lines in _fsdp_axes(setup).items():
            found.setdefault(f"FSDP's axis {name}", lines)
    if DDP in replicas.wrappers and replicas.lines:
        found.setdefault(DDP, replicas.lines)
    elif replicas.is_marked and replicas.lines:
        found.setdefault("replicas of marked parameters", replicas.lines)
    return found


def wrapped_roots(step_view: StepView) -> frozenset[str]:
    """Return what tells the roots that DDP wraps, or of which it wraps a part."""
    return frozenset(root_of(call.path) for call in step_view.calls if DDP in call.node.wrappers)


def _fsdp_axes(setup: StepView) -> dict[str, tuple[Array, ...]]:
    """Return {axis: its lines} of the mesh axes that FSDP cut DTensor parameters along."""
    placed: dict[str, dict[str, list[Placement]]] = {}
    meshes: dict[str, tuple[Mesh, ...]] = {}
    for values in setup.values(Phase.SETUP):
        if values.slot.startswith("param:") and values.source == "dtensor":
            view = values.views[0]
            meshes[view.mesh_name] = view.meshes
            for axis, placement in view.placements.items():
                placed.setdefault(view.mesh_name, {}).setdefault(axis, []).append(placement)
    return {
        axis: tuple(
            line for mesh in meshes[name] for line in sorted_lines(mesh, [axis]) if len(line) > 1
        )
        for name, by_axis in placed.items()
        for axis, placements in by_axis.items()
        if is_fsdp_axis(axis, placements, len(by_axis))
    }
