"""What a run shows of its layout, axis by axis: what a proposed layout file rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rankscope.diagnosis.issuedcollectives import issues_of
from rankscope.diagnosis.rules.equality import is_within_rounding
from rankscope.diagnosis.stepview import CallView, SlotValues, StepView
from rankscope.layout.infer import lines_along
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.layout.proof import ShownValues, SlotKey, described_as, may_be_cut
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.tree.slotview import shapes_of

__all__ = ["LayoutRecords"]


class LayoutRecords(ShownValues):
    """Gathered step by step; what all calls of a path hold in a slot counts as one value, and
    a gradient as what it is the gradient of."""

    def __init__(self, lines: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        super().__init__(lines)
        self.integers: set[SlotKey] = set()
        self.runs: dict[tuple[SlotKey, str], int] = {}
        """Positions that are whole numbers, consecutive over the ranks along an axis: how many one
        rank has. They are the only integers of one dim that follow each other like that."""
        self.meshes: dict[str, tuple[Mesh, ...]] = {}
        """{kind of mesh: the meshes of it that tensors lie on}"""
        self.on_mesh: dict[tuple[str, str], list[Placement]] = {}
        """{(kind of mesh, axis): how DTensor parameters lie along it at setup}"""
        self.is_fsdp = False
        """True once a module wrapped in FSDP was seen."""

    def read(self, step_view: StepView) -> None:
        """Add what one step shows."""
        for call in step_view.calls:
            self.is_fsdp |= any(word.startswith("FSDP") for word in call.node.wrappers)
        for issue in issues_of(step_view):
            if issue.lacks:
                continue
            if self.is_fsdp and issue.op.startswith(("all_gather", "reduce_scatter")):
                continue  # of parameters, not of activations
            axis = self._axis_of(issue.members)
            if axis:
                kind = (str(issue.facts.get("issuer", "")), issue.op)
                self.issued.setdefault((issue.call.path, axis), set()).add(kind)
        for call in step_view.calls:
            if call.phase is Phase.COLLECTIVE:
                continue
            if call.phase is Phase.FORWARD:
                modules = [child for child in call.children if child.phase is Phase.FORWARD]
                self.modules[call.path] = call.path, call.node.class_name
                if modules:
                    own = self.inner.setdefault(call.path, set())
                    own.update(child.path for child in modules)
            for slot, values in call.slots.items():
                self._note_mesh(call, values)
                if (
                    values.dtype != "python"
                    and values.source == "unknown"
                    and len(values.ranks) > 1
                ):
                    self._note(call, described_as(slot, call.phase.word), values)

    def mesh_axis(self, axis: str) -> tuple[str, str] | None:
        """Return the kind of mesh and the name of its axis that runs over the same ranks as one of
        `lines`; None where tensors lie on no such mesh."""
        names = ((kind, name) for kind, meshes in self.meshes.items() for name in meshes[0].axes)
        return next((each for each in names if self._axis_of_mesh(*each) == axis), None)

    def _axis_of_mesh(self, kind: str, name: str) -> str:
        """Return the axis over the same ranks as one of a mesh, "" where there is none."""
        along = {tuple(sorted(line)) for m in self.meshes[kind] for line in lines_along(m, [name])}
        return next((axis for axis, lines in self.lines.items() if along == {*lines}), "")

    def _note_mesh(self, call: CallView, values: SlotValues) -> None:
        for view in values.views:
            if view.mesh_name not in self.meshes and view.meshes:
                self.meshes[view.mesh_name] = view.meshes
            if call.phase is Phase.SETUP and view.source is LayoutSource.DTENSOR:
                for name, placement in view.placements.items():
                    self.on_mesh.setdefault((view.mesh_name, name), []).append(placement)
                    axis = self._axis_of_mesh(view.mesh_name, name)
                    if axis and may_be_cut(name, is_fsdp=self.is_fsdp):
                        whole = view.global_shape or ()
                        self.note_cut((call.path, view.slot), axis, placement, view.shapes(), whole)

    def _note(self, call: CallView, slot: str, values: SlotValues) -> None:
        key = (call.path, slot)
        shapes = shapes_of(values.views)
        kinds = (values.flags & int(ValueFlag.MIX64)).tolist()
        each = zip(values.ranks.tolist(), values.hashes.tolist(), kinds, values.is_known.tolist())
        prints = {rank: (bits, kind) for rank, bits, kind, is_known in each if is_known}
        may_round = call.phase in (Phase.BACKWARD, Phase.GRADS)
        self.note(
            key,
            shapes,
            {} if values.is_constant else prints,
            lambda lines: may_round and is_within_rounding(values, [*map(np.array, lines)]),
        )
        if call.phase in (Phase.FORWARD, Phase.SETUP):
            if values.dtype.startswith(("int", "uint")):
                self.integers.add(key)
            if call.phase is Phase.FORWARD and values.is_known.all() and not values.is_constant:
                self.note_twin(key, (values.hashes.tobytes(), values.ranks.tobytes()))
        places = {axis: values.at(np.array(lines)) for axis, lines in self.lines.items()}
        for axis, at in places.items() if key in self.integers and not values.is_constant else ():
            first, last = values.column("min")[at], values.column("max")[at]
            length, *more = self.shape(key) or (0, 0)
            is_run = (at >= 0).all() and not more and (last - first == length - 1).all()
            if is_run and (first[:, 1:] == last[:, :-1] + 1).all():
                self.runs[key, axis] = length

    def _axis_of(self, members: Iterable[int]) -> str:
        own = tuple(sorted(members))
        return next((axis for axis, lines in self.lines.items() if own in lines), "")
