"""What a run shows of its layout, axis by axis: what a proposed layout file rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from rankscope.diagnosis.issuedcollectives import issues_of
from rankscope.diagnosis.rules.equality import is_within_rounding
from rankscope.diagnosis.stepview import CallView, SlotValues, StepView
from rankscope.layout.infer import lines_along
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.record.phases import Phase

__all__ = ["GRADIENT_SLOTS", "LayoutRecords", "SlotKey"]

Array = NDArray[Any]
SlotKey = tuple[str, str]
"""(path, slot); a gradient counts as what it is the gradient of."""
GRADIENT_SLOTS: Final = {"input": "grad_input", "output": "grad_output"}


@dataclass(slots=True)
class SlotFacts:
    """What all calls of one slot have in common, along one axis."""

    same: int = 0
    """Calls in which all ranks along it held the same bytes, and not a constant."""
    other: int = 0
    """Calls in which some did not."""
    apart: int = 0
    """Calls in which no two did."""


@dataclass(slots=True)
class LayoutRecords:
    """Gathered step by step."""

    lines: Mapping[str, Array]
    """{axis: [lines, ranks]}"""
    facts: dict[tuple[SlotKey, str], SlotFacts] = field(default_factory=dict)
    shapes: dict[SlotKey, tuple[int, ...]] = field(default_factory=dict)
    integers: set[SlotKey] = field(default_factory=set)
    issued: dict[tuple[str, str], set[tuple[str, str]]] = field(default_factory=dict)
    """{(path, axis): {(issuer, op)}}"""
    twins: dict[bytes, set[SlotKey]] = field(default_factory=dict)
    """Slots that held the same bytes on every rank."""
    runs: dict[tuple[SlotKey, str], int] = field(default_factory=dict)
    """Positions that are whole numbers, consecutive over the ranks along an axis: how many one rank
    has. They are the only integers of one dim that follow each other like that."""
    meshes: dict[str, tuple[Mesh, ...]] = field(default_factory=dict)
    """{kind of mesh: the meshes of it that tensors lie on}"""
    parameters: dict[tuple[str, str], list[Placement]] = field(default_factory=dict)
    """{(kind of mesh, axis): how DTensor parameters lie along it at setup}"""
    is_fsdp: bool = False
    """True once a module wrapped in FSDP was seen."""
    leaves: set[str] = field(default_factory=set)
    inner: dict[str, set[str]] = field(default_factory=dict)
    """{path of a module with others inside: their paths}"""

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
                self.leaves.add(call.path)
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
                    self._note(call, _described_as(slot, call.phase), values)

    def mesh_axis(self, axis: str) -> tuple[str, str] | None:
        """Return the kind of mesh and the name of its axis that runs over the same ranks as one of
        `lines`; None where tensors lie on no such mesh."""
        wanted = {tuple(line) for line in self.lines[axis].tolist()}
        for kind, meshes in self.meshes.items():
            for name in meshes[0].axes:
                along = {tuple(sorted(line)) for m in meshes for line in lines_along(m, [name])}
                if along == wanted:
                    return kind, name
        return None

    def _note_mesh(self, call: CallView, values: SlotValues) -> None:
        for view in values.views:
            if view.mesh_name not in self.meshes and view.meshes:
                self.meshes[view.mesh_name] = view.meshes
            if call.phase is Phase.SETUP and view.source is LayoutSource.DTENSOR:
                for axis, placement in view.placements.items():
                    self.parameters.setdefault((view.mesh_name, axis), []).append(placement)

    def _note(self, call: CallView, slot: str, values: SlotValues) -> None:
        key = (call.path, slot)
        if call.phase in (Phase.FORWARD, Phase.SETUP):
            shapes = {tuple(fold.shape) for view in values.views for fold in view.pieces}
            if len(shapes) == 1:
                self.shapes[key] = shapes.pop()
            if values.dtype.startswith(("int", "uint")):
                self.integers.add(key)
            if call.phase is Phase.FORWARD and values.is_known.all() and not values.is_constant:
                mark = values.hashes.tobytes() + values.ranks.tobytes()
                self.twins.setdefault(mark, set()).add(key)
        for axis, lines in self.lines.items():
            facts = self.facts.setdefault((key, axis), SlotFacts())
            agreements = values.agreements(lines)
            if values.is_constant or (agreements == -1).any():
                continue
            is_same = bool((agreements == 1).all())
            is_rounded = call.phase in (Phase.BACKWARD, Phase.GRADS) and is_within_rounding(
                values, [*lines]
            )
            facts.same += is_same
            facts.other += not (is_same or is_rounded)
            places = values.at(lines)
            if key in self.integers and len(self.shapes.get(key, ())) == 1:
                first, last = values.column("min")[places], values.column("max")[places]
                length = self.shapes[key][0]
                if (last - first == length - 1).all() and (first[:, 1:] == last[:, :-1] + 1).all():
                    self.runs[key, axis] = length
            hashes = values.hashes[places]
            facts.apart += all(len(set(line.tolist())) == len(line) for line in hashes)

    def _axis_of(self, members: Iterable[int]) -> str:
        own = sorted(members)
        for axis, lines in self.lines.items():
            if any(own == line.tolist() for line in lines):
                return axis
        return ""


def _described_as(slot: str, phase: Phase) -> str:
    """Return the slot whose placement a gradient shares."""
    head, dot, rest = slot.partition(".")
    if phase is Phase.BACKWARD:
        for own, gradient in GRADIENT_SLOTS.items():
            if head == gradient:
                return f"{own}{dot}{rest}"
    return f"param:{slot[5:]}" if slot.startswith("grad:") else slot
