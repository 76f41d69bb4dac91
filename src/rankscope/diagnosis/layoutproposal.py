"""A layout file proposed from what a run itself shows: what is equal, what adds up, what lies
behind each other.

Axis by axis: values with the same bytes on all ranks along it, in every call, are replicas. Where a
module with other weights on each rank sums over them (forward: its output; backward: the gradient
of its input), its weight is cut along its inputs, or its outputs. A dim that a gather or sum makes
as many times longer or shorter as there are ranks is cut. From there placements travel: to slots
with the same bytes, and through modules without children that keep the shape. Two answers for one
slot are none.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.evidence.distances import is_within_rounding
from rankscope.diagnosis.evidence.issuedcollectives import issues_of
from rankscope.diagnosis.evidence.stepview import (
    CallView,
    SlotValues,
    StepView,
    grouped,
    step_view_of,
)
from rankscope.layout.infer import Claim, Proof, SlotKey, cut, is_fsdp_axis, lines_along
from rankscope.layout.layoutfile import described_as
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.record.phases import Phase
from rankscope.record.ranks import MESSAGES
from rankscope.tree.slotview import shapes_of
from rankscope.tree.tensors.proofs import RecordedValues, digests
from rankscope.tree.views import Trace

_DIGITS: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_WHOLE_RUN: Final = "complete"
"""The state of a trace that lacks nothing and whose ranks ended in order."""
_UNNAMED: Final = re.compile(r"axis\d+")
"""What the axes of a mesh without names are called."""
_BARE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""Names that need no quotes in a layout file."""
_ACTIVATIONS: Final = ("input", "output")
_SUMS: Final = ("all_reduce", "reduce_scatter")
_GATHERS: Final = ("all_gather",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedEntry:
    """One `[[layout]]` of the proposal."""

    path: str
    """A glob that matches these modules and nothing below them."""
    slot: str
    placements: Mapping[str, Placement]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProposal:
    """What a run shows of its layout."""

    axes: Mapping[str, int]
    """Row-major over the ranks."""
    axis_reasons: tuple[str, ...]
    entries: tuple[ProposedEntry, ...]
    undecided: int
    lacks: str
    """Why the trace shows no whole run; "" where it does."""


def propose_layout(trace: Trace) -> LayoutProposal:
    """Return a layout file that the run itself suggests, for values that no DTensor describes. One
    rank holds everything whole: the trace needs two or more."""
    mesh = _mesh(int(trace.run["world_size"]), trace.run.get("groups", ()))
    records = LayoutRecords({axis: lines_along(mesh, [axis]) for axis in mesh.axes})
    for step in [*trace.setup, *trace.steps]:
        records.read(step_view_of(step))
    placed = _Placing(records)
    names = _names(placed)
    entries = tuple(_entries(placed, names))
    undecided = len({key for key, _ in records.facts} - {key for key, _ in placed.known})
    return LayoutProposal(
        axes={names[axis][0]: size for axis, size in zip(mesh.axes, mesh.shape)},
        axis_reasons=tuple(f"{names[axis][0]}: {names[axis][1]}" for axis in mesh.axes),
        entries=entries,
        undecided=undecided,
        lacks="" if trace.state == _WHOLE_RUN else trace.state,
    )


# ---- axes ----------------------------------------------------------------------------------------


def _mesh(world_size: int, groups: Iterable[Mapping[str, Any]]) -> Mesh:
    """Return axes along which process groups run, the last one over neighbours; one for no grid."""
    steps: dict[int, set[int]] = {}
    for group in groups:
        members = sorted(map(int, group["members"]))
        gaps = {b - a for a, b in itertools.pairwise(members)}
        if len(gaps) == 1 and len(members) < world_size:
            steps.setdefault(gaps.pop(), set()).add(len(members))
    sizes: list[int] = []
    stride = 1
    while stride < world_size:
        fitting = [size for size in steps.get(stride, ()) if not world_size % (stride * size)]
        size = min(fitting, default=world_size // stride)
        sizes.append(size)
        stride *= size
    shape = tuple(reversed(sizes)) or (1,)
    axes = tuple(f"axis{number}" for number in range(len(shape)))
    return Mesh(axes=axes, shape=shape, ranks=tuple(range(world_size)))


def _names(placed: _Placing) -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    for axis in placed.shown.lines:
        issued = placed.shown.issued_along(axis)
        forward = {op for issuer, op in issued if issuer == "forward"}
        is_cut = any(
            key[1].startswith("param:") and placement.dim is not None
            for (key, cut_axis), (placement, *_) in placed.known.items()
            if cut_axis == axis
        )
        mesh = _of_mesh(placed.shown, axis)
        root_facts = [placed.shown.facts.get((("", s), axis)) for s in ("input.0", "input")]
        if mesh is not None:
            name, why = mesh
        elif is_cut:
            name, why = "tp", "modules hold parts of their weights and sum over these ranks"
        elif any(op.startswith("all_to_all") for op in forward):
            name, why = "ep", "modules send rows to each other (all_to_all)"
        elif {op for _, op in issued} & MESSAGES:
            name, why = "pp", "the ranks send each other messages, as stages of a pipeline do"
        elif forward:
            name, why = "cp", f"modules exchange activations ({', '.join(sorted(forward))})"
        elif any(fact.unequal > 0 for fact in root_facts if fact is not None):
            name, why = "dp", "the ranks are handed other data and exchange no activations"
        else:
            name, why = axis, "nothing shows what it is for"
        names_so_far = {used for used, _ in names.values()}
        names[axis] = (name if name not in names_so_far else f"{name}{len(names_so_far)}", why)
    return names


def _of_mesh(records: LayoutRecords, axis: str) -> tuple[str, str] | None:
    """Return the name of an axis by the mesh of tensors or by DTensors cut along it, and why."""
    mesh_axis = records.mesh_axis(axis)
    if mesh_axis is None:
        return None
    kind, name = mesh_axis
    if _BARE.fullmatch(name) and not _UNNAMED.fullmatch(name):
        return name, f"the name of the axis over these ranks in the mesh {kind}"
    placements = records.on_mesh.get(mesh_axis, [])
    if not any(placement.dim is not None for placement in placements):
        return None
    if records.is_fsdp and is_fsdp_axis("", placements, len(records.meshes[kind][0].axes)):
        return "dp", "FSDP cuts parameters over these ranks"
    return "tp", "parameters are DTensors that are cut over these ranks"


# ---- placements ----------------------------------------------------------------------------------


class _Placing(Proof):
    """What is proven, and beside it what collectives and the root's tokens suggest."""

    shown: LayoutRecords

    def read_module(self, call: str, axis: str) -> None:
        """Add what a module's own collectives show about its weight, input and output."""
        super().read_module(call, axis)
        issued = self.shown.issued.get((call, axis), set())
        sums = {issuer for issuer, op in issued if op.startswith(_SUMS)}
        gathers = {issuer for issuer, op in issued if op.startswith(_GATHERS)}
        size = len(self.shown.lines[axis][0])
        ends = self.key(call, "input"), self.key(call, "output")
        input_shape, output_shape = (self.shown.shape(key) if key else () for key in ends)
        if (
            not ends[0]
            or not ends[1]
            or not input_shape
            or not output_shape
            or call in self.shown.inner
        ):
            return
        weight = (call, "param:weight")
        shape = self.shown.shape(weight)
        facts = self.shown.facts.get((weight, axis))
        if len(shape) == 2 and facts is not None and facts.distinct and not facts.equal:
            is_lookup = any(path == call and slot.startswith("input") for path, slot in
                            self.shown.integers)  # fmt: skip
            if "forward" in sums and is_lookup and output_shape[-1] == shape[1]:
                self.say(weight, axis, Claim(cut(0), "rows are looked up in parts that are summed"))
            elif "forward" in sums and input_shape[-1] == shape[1] and output_shape[-1] == shape[0]:
                self.say(weight, axis, Claim(cut(1), "the module sums its output over these ranks"))
                self.say_last(call, "input", axis, 1)
            elif ("backward" in sums or "forward" in gathers) and output_shape[-1] == shape[0]:
                why = "the gradient of the module's input is summed"
                gathered = "the module gathers its input"
                self.say(weight, axis, Claim(cut(0), why if "backward" in sums else gathered))
                self.say_last(call, "output", axis, 0)
                bias = (call, "param:bias")
                if self.shown.shape(bias) == (shape[0],):
                    self.say(bias, axis, Claim(cut(0), "as long as this rank's rows of the weight"))
        if "forward" in sums | gathers and len(input_shape) == len(output_shape):
            leading = range(len(input_shape) - 1)
            longer = [dim for dim in leading if output_shape[dim] == size * input_shape[dim]]
            shorter = [dim for dim in leading if input_shape[dim] == size * output_shape[dim]]
            if len(longer) == 1 and "forward" in gathers:
                why = f"gathered: dim {longer[0]} of the output is {size} times as long"
                self.say(ends[0], axis, Claim(cut(longer[0]), why))
            elif len(shorter) == 1:
                why = f"summed and cut: dim {shorter[0]} of the input is {size} times as long"
                self.say(ends[1], axis, Claim(cut(shorter[0]), why))

    def conclude_axis(self, axis: str) -> None:
        """Say how the root's tokens are cut along an axis: positions that are cut too show it,
        positions that are not, or ranks that exchange no activations. Where no weight is cut along
        it, all that begins with the dims of the tokens is cut alike."""
        root = self.key("", "input")
        shape = self.shown.shape(root) if root else ()
        facts = self.shown.facts.get((root, axis)) if root else None
        if root is None or facts is None or facts.equal or not facts.distinct or len(shape) < 2:
            return
        runs = {key: size for (key, key_axis), size in self.shown.runs.items() if key_axis == axis}
        dims = {dim for size in runs.values() for dim in (0, 1) if shape[dim] == size}
        is_exchanging = any(issuer == "forward" for issuer, _ in self.shown.issued_along(axis))
        common = [key for key in self.shown.integers if self.shown.shape(key) == shape[1:2]
                 and self.is_whole(key, axis)]  # fmt: skip
        if len(dims) == 1:
            (dim,), why = dims, "the ranks have consecutive positions, as many as this dim is long"
        elif not runs and common:
            dim, why = 0, f"the ranks have the same positions ({common[0][0]}) and other tokens"
        elif not runs and not is_exchanging:
            dim, why = 0, "the ranks are handed other data and exchange no activations"
        else:
            return
        for key in runs:
            self.say(key, axis, Claim(cut(0), "consecutive from rank to rank"))
        self.say(root, axis, Claim(cut(dim), why))
        if any(key_axis == axis and proof[0].dim is not None and key[1][:6] == "param:"
               for (key, key_axis), proof in self.known.items()
               if (key, key_axis) in self.shown.facts):  # fmt: skip
            return
        for key in self.shown.shapes:
            if self.shown.shape(key)[:2] == shape[:2] and key[1].split(".")[0] in _ACTIVATIONS:
                self.say(key, axis, Claim(cut(dim), "begins with the dims of the root's input"))


# ---- entries -------------------------------------------------------------------------------------


def _entries(placed: _Placing, names: Mapping[str, tuple[str, str]]) -> Iterator[ProposedEntry]:
    """Yield one entry for each slot of sibling modules, where none of them says otherwise."""
    families: dict[tuple[str, str, str], dict[Placement, str]] = {}
    refused: set[tuple[str, str, str]] = set()
    for (key, axis), facts in placed.shown.facts.items():
        family = (_pattern(key[0]), key[1], axis)
        proof = placed.known.get((key, axis))
        if proof is not None:
            families.setdefault(family, {}).setdefault(proof[0], proof[1])
        elif facts.equal or facts.unequal:
            refused.add(family)
    merged: dict[tuple[str, str], dict[str, tuple[Placement, str]]] = {}
    for (path, slot, axis), said_of in families.items():
        if len(said_of) == 1 and (path, slot, axis) not in refused:
            ((placement, reason),) = said_of.items()
            merged.setdefault((path, slot), {})[axis] = placement, reason
    keys = {key for key, _ in placed.shown.facts}
    slots_of = grouped(((_pattern(path), slot.split(".")[0]), slot) for path, slot in keys)
    for (path, slot), by_axis in sorted(merged.items()):
        kind = slot.split(".")[0]
        is_only = kind in _ACTIVATIONS and len({*slots_of[path, kind]}) == 1
        yield ProposedEntry(
            path=path or "(root)",
            slot=kind if is_only else slot,
            placements={names[axis][0]: placement for axis, (placement, _) in by_axis.items()},
            reasons=tuple(f"{names[axis][0]}: {why}" for axis, (_, why) in by_axis.items()),
        )


def _pattern(path: str) -> str:
    """Return the glob of a module and its siblings, in which all signs but digits are literal."""
    return _DIGITS.sub(lambda number: "[0-9]" * len(number[0]), glob.escape(path))


# ---- what a run shows ----------------------------------------------------------------------------


class LayoutRecords(RecordedValues):
    """Gathered over steps. All calls of a path count as one value, a gradient as what it is of."""

    def __init__(self, lines: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        super().__init__(lines, attrgetter("path"))
        self.integers: set[SlotKey] = set()
        self.runs: dict[tuple[SlotKey, str], int] = {}
        """How many positions (whole numbers that run on from rank to rank) one rank has."""
        self.meshes: dict[str, tuple[Mesh, ...]] = {}
        """{kind of mesh: the meshes of it that tensors lie on}"""
        self.on_mesh: dict[tuple[str, str], list[Placement]] = {}

    def read(self, step_view: StepView) -> None:
        """Add what one step shows."""
        self.read_calls([call.node for call in step_view.calls])
        for issue in issues_of(step_view):
            if issue.lacks:
                continue
            if self.is_fsdp and issue.op.startswith(("all_gather", "reduce_scatter")):
                continue  # of parameters, not of activations
            members = tuple(sorted(issue.members))
            axis = next((axis for axis, lines in self.lines.items() if members in lines), "")
            if axis:
                kind = (str(issue.facts.get("issuer", "")), issue.op)
                self.issued.setdefault((issue.call.path, axis), set()).add(kind)
        for call in step_view.calls:
            for slot, values in call.slots.items() if call.phase is not Phase.COLLECTIVE else ():
                for view in values.views:
                    if view.meshes:
                        self.meshes.setdefault(view.mesh_name, view.meshes)
                    if call.phase is Phase.SETUP and view.source is LayoutSource.DTENSOR:
                        for name, placement in view.placements.items():
                            self.on_mesh.setdefault((view.mesh_name, name), []).append(placement)
                is_plain = values.dtype != "python" and values.source == "unknown"
                if is_plain and len(values.ranks) > 1:
                    self._note(call, described_as(slot), values)

    def issued_along(self, axis: str) -> set[tuple[str, str]]:
        """Return (issuer, op) of all collectives over the ranks along an axis."""
        along = [kinds for (_, issued_axis), kinds in self.issued.items() if issued_axis == axis]
        return set().union(*along)

    def mesh_axis(self, axis: str) -> tuple[str, str] | None:
        """Return (kind of mesh, name) of the tensors' axis over the same ranks."""
        for kind, meshes in self.meshes.items():
            for name in meshes[0].axes:
                if self.axis_of(meshes, name) == axis:
                    return kind, name
        return None

    def _note(self, call: CallView, slot: str, values: SlotValues) -> None:
        key = (call.path, slot)
        may_round = call.phase in (Phase.BACKWARD, Phase.GRADS)
        self.note(
            key,
            shapes_of(values.views),
            digests(values.views),
            lambda lines: may_round and is_within_rounding(values, [*map(np.array, lines)]),
            is_twin=call.phase is Phase.FORWARD,
        )
        if call.phase in (Phase.FORWARD, Phase.SETUP) and values.dtype.startswith(("int", "uint")):
            self.integers.add(key)
        places = {axis: values.at(np.array(lines)) for axis, lines in self.lines.items()}
        for axis, at in places.items() if key in self.integers and not values.is_constant else ():
            first, last = values.column("min")[at], values.column("max")[at]
            length, *more = self.shape(key) or (0, 0)
            is_run = (at >= 0).all() and not more and (last - first == length - 1).all()
            if is_run and (first[:, 1:] == last[:, :-1] + 1).all():
                self.runs[key, axis] = length
