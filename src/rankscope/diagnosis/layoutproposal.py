"""A layout file proposed from what a run itself shows: what is equal, what adds up, what lies
behind each other.

Three things are read off the records, axis by axis. Values that hold the same bytes on all ranks
along an axis, in every call, are replicas. Where a module with other weights on each rank sums over
them (forward: its output; backward: the gradient of its input), its weight is cut along its inputs,
or its outputs. Where a module gathers or sums and one dim of what comes out is as many times longer
or shorter as there are ranks, that dim is cut. From there placements travel: to slots that hold the
same bytes, and through modules without children that keep the shape. Two answers for one slot are
no answer.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.layoutrecords import GRADIENT_SLOTS, LayoutRecords, SlotKey
from rankscope.diagnosis.layouts import sorted_lines
from rankscope.diagnosis.stepview import step_view_of
from rankscope.layout.infer import is_fsdp_axis
from rankscope.layout.placement import Mesh, Placement, PlacementKind
from rankscope.record.collective import MESSAGES
from rankscope.tree.joinedcolumns import as_arrays
from rankscope.tree.views import Trace

__all__ = ["LayoutProposal", "ProposedEntry", "propose_layout"]

Array = NDArray[Any]
_DIGITS: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_WHOLE_RUN: Final = "complete"
"""The state of a trace that lacks nothing and whose ranks ended in order."""
_UNNAMED: Final = re.compile(r"axis\d+")
"""What the axes of a mesh without names are called."""
_BARE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""Names that need no quotes in a layout file."""
_WHOLE: Final = Placement(kind=PlacementKind.REPLICATE)
_SUMS: Final = ("all_reduce", "reduce_scatter")
_GATHERS: Final = ("all_gather",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedEntry:
    """One `[[layout]]` of the proposal."""

    path: str
    """A glob that matches the modules alike and nothing below them."""
    slot: str
    placements: Mapping[str, Placement]
    """By axis."""
    reasons: tuple[str, ...]
    """Why, one for each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProposal:
    """What a run shows of its layout."""

    axes: Mapping[str, int]
    """Row-major over the ranks."""
    axis_reasons: tuple[str, ...]
    entries: tuple[ProposedEntry, ...]
    undecided: int
    """Slots of several ranks of which nothing could be proposed."""
    lacks: str
    """Why the trace does not show a whole run, "" where it does."""


def propose_layout(trace: Trace) -> LayoutProposal:
    """Return a layout file that the run itself suggests, for values that no DTensor describes.

    Args:
        trace: an open trace of two ranks or more; one rank holds everything whole.
    """
    columns = as_arrays(trace.columns())
    mesh = _mesh(int(trace.run["world_size"]), trace.run.get("groups", ()))
    lines = {axis: np.stack(sorted_lines(mesh, [axis])) for axis in mesh.axes}
    records = LayoutRecords(lines)
    for step in [*trace.setup, *trace.steps]:
        records.read(step_view_of(step, columns))
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
    """Return axes that the job's process groups run along, the last one over neighbours; one axis
    over all ranks where they make no grid."""
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
    """Return {axis: (a name that says what it does, why)}."""
    found: dict[str, tuple[str, str]] = {}
    for axis in placed.records.lines:
        issued = {kind for (_, own), kinds in placed.records.issued.items() if own == axis
                  for kind in kinds}  # fmt: skip
        forward = {op for issuer, op in issued if issuer == "forward"}
        is_cut = any(
            key[1].startswith("param:") and placement.dim is not None
            for (key, own), (placement, _) in placed.known.items()
            if own == axis
        )
        mesh = _of_mesh(placed.records, axis)
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
        elif placed.has_own_data(axis):
            name, why = "dp", "the ranks are handed other data and exchange no activations"
        else:
            name, why = axis, "nothing shows what it is for"
        taken = {known for known, _ in found.values()}
        found[axis] = (name if name not in taken else f"{name}{len(taken)}", why)
    return found


def _of_mesh(records: LayoutRecords, axis: str) -> tuple[str, str] | None:
    """Return what the mesh that tensors lie on says of an axis: its name there, else what DTensor
    parameters that are cut along it are for; None where there is no such mesh."""
    known = records.mesh_axis(axis)
    if known is None:
        return None
    kind, name = known
    if _BARE.fullmatch(name) and not _UNNAMED.fullmatch(name):
        return name, f"the name of the axis over these ranks in the mesh {kind}"
    placements = records.parameters.get(known, [])
    if not any(placement.dim is not None for placement in placements):
        return None
    if records.is_fsdp and is_fsdp_axis("", placements, len(records.meshes[kind][0].axes)):
        return "dp", "FSDP cuts parameters over these ranks"
    return "tp", "parameters are DTensors that are cut over these ranks"


# ---- placements ----------------------------------------------------------------------------------


class _Placing:
    """Derives placements from records."""

    def __init__(self, records: LayoutRecords) -> None:
        self.records = records
        self.known: dict[tuple[SlotKey, str], tuple[Placement, str]] = {}
        self._refused: set[tuple[SlotKey, str]] = set()
        for (key, axis), facts in records.facts.items():
            if facts.same and not facts.other:
                text = f"the same bytes on all ranks in {facts.same} of {facts.same} records"
                self._say(key, axis, _WHOLE, text)
        for axis in records.lines:
            for path in {path for path, _ in records.shapes}:
                self._of_module(path, axis)
            self._of_tokens(axis)
        while self._travel():
            pass

    def has_own_data(self, axis: str) -> bool:
        """True where what roots are handed differs along an axis."""
        facts = (self.records.facts.get((("", slot), axis)) for slot in ("input.0", "input"))
        return any(each.other > 0 for each in facts if each is not None)

    def _say(self, key: SlotKey, axis: str, placement: Placement, reason: str) -> bool:
        """Keep a placement unless something else speaks against it; True where it is new."""
        place = (key, axis)
        if place in self._refused:
            return False
        known = self.known.get(place)
        if known is not None:
            if known[0] != placement:
                del self.known[place]
                self._refused.add(place)
            return False
        facts = self.records.facts.get(place)
        is_replica = placement.kind is PlacementKind.REPLICATE
        if facts is None or (is_replica and facts.other) or (not is_replica and facts.same):
            return False
        self.known[place] = (placement, reason)
        return True

    def _of_module(self, path: str, axis: str) -> None:
        """Read what a module's own collectives say of its weight, input and output."""
        issued = self.records.issued.get((path, axis), set())
        sums = {issuer for issuer, op in issued if op.startswith(_SUMS)}
        gathers = {issuer for issuer, op in issued if op.startswith(_GATHERS)}
        size = self.records.lines[axis].shape[1]
        given, made = (self._shape(path, kind) for kind in ("input", "output"))
        if not given or not made or path in self.records.inner:
            return
        weight = (path, "param:weight")
        shape = self.records.shapes.get(weight, ())
        facts = self.records.facts.get((weight, axis))
        if len(shape) == 2 and facts is not None and facts.apart and not facts.same:
            is_lookup = any(own == path and slot.startswith("input") for own, slot in
                            self.records.integers)  # fmt: skip
            if "forward" in sums and is_lookup and made[-1] == shape[1]:
                self._say(weight, axis, _cut(0), "rows are looked up in parts that are summed")
            elif "forward" in sums and given[-1] == shape[1] and made[-1] == shape[0]:
                self._say(weight, axis, _cut(1), "the module sums its output over these ranks")
                self._say_kind(path, "input", axis, _cut(len(given) - 1),
                               "as long as this rank's columns of the weight")  # fmt: skip
            elif ("backward" in sums or "forward" in gathers) and made[-1] == shape[0]:
                self._say(weight, axis, _cut(0), "the gradient of the module's input is summed"
                          if "backward" in sums else "the module gathers its input")  # fmt: skip
                self._say_kind(path, "output", axis, _cut(len(made) - 1),
                               "as long as this rank's rows of the weight")  # fmt: skip
                bias = (path, "param:bias")
                if self.records.shapes.get(bias) == (shape[0],):
                    self._say(bias, axis, _cut(0), "as long as this rank's rows of the weight")
        if "forward" in sums | gathers and len(given) == len(made):
            leading = range(len(given) - 1)
            longer = [dim for dim in leading if made[dim] == size * given[dim]]
            shorter = [dim for dim in leading if given[dim] == size * made[dim]]
            if len(longer) == 1 and "forward" in gathers:
                why = f"gathered: dim {longer[0]} of the output is {size} times as long"
                self._say_kind(path, "input", axis, _cut(longer[0]), why)
            elif len(shorter) == 1:
                why = f"summed and cut: dim {shorter[0]} of the input is {size} times as long"
                self._say_kind(path, "output", axis, _cut(shorter[0]), why)

    def _of_tokens(self, axis: str) -> None:
        """Say how the root's tokens are cut along an axis, where something shows it: positions that
        are cut too, positions that are not, or ranks that exchange no activations. Where no weight
        is cut along it, everything that begins with the dims of the tokens is cut like them."""
        root = self._key("", "input")
        shape = self.records.shapes.get(root, ()) if root else ()
        facts = self.records.facts.get((root, axis)) if root else None
        if root is None or facts is None or facts.same or not facts.apart or len(shape) < 2:
            return
        runs = {key: size for (key, own), size in self.records.runs.items() if own == axis}
        dims = {dim for size in runs.values() for dim in (0, 1) if shape[dim] == size}
        issued = {kind for (_, own), kinds in self.records.issued.items() if own == axis
                  for kind in kinds}  # fmt: skip
        is_exchanging = any(issuer == "forward" for issuer, _ in issued)
        whole = [key for key in self.records.integers if self.records.shapes.get(key) == shape[1:2]
                 and self.known.get((key, axis), (None,))[0] == _WHOLE]  # fmt: skip
        if len(dims) == 1:
            (dim,), why = dims, "the ranks have consecutive positions, as many as this dim is long"
        elif not runs and whole:
            dim, why = 0, f"the ranks have the same positions ({whole[0][0]}) and other tokens"
        elif not runs and not is_exchanging:
            dim, why = 0, "the ranks are handed other data and exchange no activations"
        else:
            return
        for key in runs:
            self._say(key, axis, _cut(0), "consecutive from rank to rank")
        self._say(root, axis, _cut(dim), why)
        if any(own == axis and said[0].dim is not None and key[1][:6] == "param:"
               for (key, own), said in self.known.items()):  # fmt: skip
            return
        for key, own in self.records.shapes.items():
            if own[:2] == shape[:2] and key[1].split(".")[0] in GRADIENT_SLOTS:
                self._say(key, axis, _cut(dim), "begins with the dims of the root's input")

    def _travel(self) -> bool:
        """Carry placements to slots of the same bytes, and through modules that keep the shape."""
        is_new = False
        for keys in self.records.twins.values():
            for axis in self.records.lines:
                known = {self.known[key, axis][0]: key for key in keys if (key, axis) in self.known}
                if len(known) == 1:
                    ((placement, source),) = known.items()
                    text = f"the same bytes as {source[0] or '(root)'}:{source[1]}"
                    for key in keys:
                        is_new |= self._say(key, axis, placement, text)
        for path in self.records.leaves:
            for axis in self.records.lines:
                is_new |= self._through(path, axis)
        return is_new

    def _through(self, path: str, axis: str) -> bool:
        """Carry a cut through a module that works on each place along it alone."""
        given, made = self._key(path, "input"), self._key(path, "output")
        if not given or not made or (path, axis) in self.records.issued:
            return False
        before, after = self.records.shapes[given], self.records.shapes[made]
        is_new = False
        for one, other in ((given, made), (made, given)):
            said = self.known.get((one, axis))
            dim = None if said is None else said[0].dim
            if said is None or dim is None:
                continue
            if path in self.records.inner:
                is_through = one is given and before == after and self._is_residual(path, axis, dim)
                text = "of the input's shape, as what the modules inside hand out is"
            elif self._own_weights(path) == 0:
                is_through = before == after
                text = f"of the same shape as {one[1]}, with no collective between them"
            else:
                is_row = before == after[: len(before)] or before[:-1] == after[:-1]
                is_leading = dim < min(len(before), len(after) - 1)
                is_last = before[:-1] == after[:-1] and dim == len(before) - 1
                is_through = is_row and is_leading and not is_last and self._is_whole(path, axis)
                text = f"as {one[1]}: every rank has the same weights"
            if is_through:
                is_new |= self._say(other, axis, said[0], text)
        return is_new

    def _own_weights(self, path: str) -> int:
        return sum(1 for own, slot in self.records.shapes if own == path and slot[:6] == "param:")

    def _is_whole(self, path: str, axis: str) -> bool:
        """True where all parameters of a module itself are known to be replicas along an axis."""
        own = [key for key in self.records.shapes if key[0] == path and key[1][:6] == "param:"]
        return all(self.known.get((key, axis), (None,))[0] == _WHOLE for key in own)

    def _is_residual(self, path: str, axis: str, dim: int) -> bool:
        """True where modules inside hand out what is cut along the same dim, of the same shape as
        the module's output, and none anything else of that shape."""
        made = self._key(path, "output")
        shape = self.records.shapes.get(made, ()) if made else ()
        keys = [self._key(child, "output") for child in self.records.inner[path]]
        alike = [key for key in keys if key and self.records.shapes[key] == shape]
        said = [self.known.get((key, axis)) for key in alike]
        return bool(said) and all(each is not None and each[0].dim == dim for each in said)

    def _key(self, path: str, kind: str) -> SlotKey | None:
        """Return the only slot of a kind that a module has."""
        found = [key for key in ((path, kind), (path, f"{kind}.0")) if key in self.records.shapes]
        more = (path, f"{kind}.1") in self.records.shapes
        return found[0] if len(found) == 1 and not more else None

    def _shape(self, path: str, kind: str) -> tuple[int, ...]:
        key = self._key(path, kind)
        return self.records.shapes[key] if key else ()

    def _say_kind(self, path: str, kind: str, axis: str, placement: Placement, why: str) -> None:
        key = self._key(path, kind)
        if key is not None:
            self._say(key, axis, placement, why)


def _cut(dim: int) -> Placement:
    return Placement(kind=PlacementKind.SHARD, dim=dim)


# ---- entries -------------------------------------------------------------------------------------


def _entries(placed: _Placing, names: Mapping[str, tuple[str, str]]) -> Iterator[ProposedEntry]:
    """Yield one entry for each slot of sibling modules, where none of them says otherwise."""
    families: dict[tuple[str, str, str], dict[Placement, str]] = {}
    refused: set[tuple[str, str, str]] = set()
    for (key, axis), facts in placed.records.facts.items():
        family = (_pattern(key[0]), key[1], axis)
        said = placed.known.get((key, axis))
        if said is not None:
            families.setdefault(family, {}).setdefault(said[0], said[1])
        elif facts.same or facts.other:
            refused.add(family)
    merged: dict[tuple[str, str], dict[str, tuple[Placement, str]]] = {}
    for (path, slot, axis), said_of in families.items():
        if len(said_of) == 1 and (path, slot, axis) not in refused:
            ((placement, reason),) = said_of.items()
            merged.setdefault((path, slot), {})[axis] = placement, reason
    every: dict[tuple[str, str], set[str]] = {}
    for path, slot in {key for key, _ in placed.records.facts}:
        head = (_pattern(path), slot.split(".")[0])
        every.setdefault(head, set()).add(slot)
    for (path, slot), by_axis in sorted(merged.items()):
        kind = slot.split(".")[0]
        is_only = kind in GRADIENT_SLOTS and len(every[path, kind]) == 1
        yield ProposedEntry(
            path=path or "(root)",
            slot=kind if is_only else slot,
            placements={names[axis][0]: placement for axis, (placement, _) in by_axis.items()},
            reasons=tuple(f"{names[axis][0]}: {why}" for axis, (_, why) in by_axis.items()),
        )


def _pattern(path: str) -> str:
    """Return the glob of a module and its siblings, in which all signs but digits are literal."""
    return _DIGITS.sub(_digits, glob.escape(path))


def _digits(number: re.Match[str]) -> str:
    return "[0-9]" * len(number[0])
