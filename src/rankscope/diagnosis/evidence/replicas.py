"""Which ranks should hold the same of a value, and how that is known.

In falling order of trust: read off DTensors, marked by a framework on its parameters, declared in a
layout file (`Layouts`), inferred from setup (`InferredReplicas`). Nothing else is compared.

Plain parameters that are bitwise equal at setup are replicas from then on. So are pieces of a
DTensor at the same place of several meshes, because its layout describes one mesh. Constants (ones,
zeros) are equal on shards as well, so they count only

* on a *line*: ranks whose parameters are all equal, at least one of them not constant, and which
  are wrapped or given unlike batches (data-parallel), or
* where their module had the same inputs and gradients of its outputs: then its own gradients are
  the same by arithmetic, or
* where a norm holds them, as long as the rows of an embedding that these ranks hold whole: what is
  as wide as the model is no part of it, or
* where they are one element, which nobody cuts, in a module of DTensors that had the same inputs
  and in which no plain parameter differs.

The same is asked of what stands beside a plain parameter that is another one on each of the ranks:
the bias of a row-parallel layer is a replica, the bias of a head of each rank's own is not.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.diagnosis.evidence.stepview import (
    Array,
    SlotValues,
    StepView,
    grouped,
    root_of,
    sibling_path,
)
from rankscope.layout.infer import AxisName, is_fsdp_axis, lines_along, named_as
from rankscope.layout.layoutfile import FSDP1_AXIS, LayoutFile, described_as
from rankscope.layout.placement import Mesh, Placement, PlacementKind
from rankscope.record.phases import Phase

# ---- what layouts say ----------------------------------------------------------------------------

_PLACED: Final = ("dtensor", "marked", "declared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Same:
    """Groups of ranks that should hold the same of one value."""

    groups: tuple[Array, ...]
    source: str
    """"dtensor", "marked", "declared" or "inferred"."""


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
            self._groups[key] = _wide(_whole_lines(self.mesh, placements))
        return Same(groups=self._groups[key], source="declared")

    def placements(self, path: str, slot: str) -> Mapping[str, Placement]:
        """Return the layout file's placements of a slot: a gradient lies as its parameter does."""
        if self.declared is None or self.mesh is None:
            return {}
        key = (path, slot)
        if key not in self._named:
            placements = self.declared.placements(path, slot)
            if not placements and slot.startswith("grad:"):
                placements = self.declared.placements(path, described_as(slot))
            self._named[key] = placements
        return self._named[key]

    def is_own(self, values: SlotValues) -> bool:
        """True where the layout file says that each rank has another one on purpose."""
        if self.declared is None or self.mesh is None:
            return False
        return self.declared.is_own(values.call.path, values.slot)

    def _recorded(self, values: SlotValues) -> tuple[Array, ...]:
        groups: list[Array] = []
        for view in values.views:
            placements = view.placements
            key = (view.mesh_name, tuple(placements.items()))
            if key not in self._groups:
                self._groups[key] = _wide(
                    line for mesh in view.meshes for line in _whole_lines(mesh, placements)
                )
            if len(values.views) == 1:
                return self._groups[key]
            view_ranks = np.array(view.ranks, np.int64)
            groups += [g for g in self._groups[key] if np.isin(g, view_ranks).all()]
        return tuple(groups)


def _whole_lines(mesh: Mesh, placements: Mapping[str, Placement]) -> tuple[Array, ...]:
    kinds = {axis: placement.kind for axis, placement in placements.items()}
    axes = [axis for axis in mesh.axes if kinds.get(axis) is PlacementKind.REPLICATE]
    return sorted_lines(mesh, axes) if axes else ()


def _wide(groups: Iterable[Array]) -> tuple[Array, ...]:
    return tuple(group for group in groups if len(group) > 1)


# ---- what is inferred ----------------------------------------------------------------------------

RootPlace = tuple[str, int]
_Part = frozenset[tuple[str, int]]
"""{(path of a root, how many roots the data went through before it)}."""
_OF_ONE_RANK: Final = re.compile("expert|head|task|adapter")
"""What stands in the path of modules that may be another one on each rank."""
DDP: Final = "DDP"
FSDP1_FLAT: Final = "_flat_param"
"""FSDP1's parameter; every rank holds a part of it because its ranks are data-parallel."""
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)


def clusters(values: SlotValues, among: Array | None = None) -> tuple[Array, ...]:
    """Return the groups of two ranks or more, of those `among` which it is asked, that hold the
    same bytes, each sorted."""
    ranks = values.ranks if among is None else np.sort(among)
    at = values.at(ranks)
    filled = values.has_elements[at]
    holders = grouped(zip(values.hashes[at[filled]].tolist(), ranks[filled].tolist()))
    return tuple(np.array(g, np.int64) for _, g in sorted(holders.items()) if len(g) > 1)


@np.errstate(over="ignore")
def _equal_lines(equal: Sequence[SlotValues], cut: Sequence[SlotValues]) -> tuple[Array, ...]:
    """Return the groups of two ranks or more that hold the same of everything. What is `cut` over
    data-parallel ranks proves that they belong together, whatever it holds."""
    holders = [values.ranks for values in (*equal, *cut)]
    ranks = np.unique(np.concatenate([np.zeros(0, np.int64), *holders]))
    prints, number = np.zeros(len(ranks), np.uint64), np.uint64(1)
    for values in equal:
        number += _STEP
        mixed = (values.hashes ^ number) * _MIX
        prints[np.searchsorted(ranks, values.ranks)] += mixed ^ (mixed >> np.uint64(29))
    lines = (ranks[prints == fingerprint] for fingerprint in np.unique(prints))
    return tuple(line for line in lines if len(line) > 1)


def _across(equal: Iterable[Array], meshes: Sequence[Mesh]) -> tuple[Array, ...]:
    if len({mesh.shape for mesh in meshes}) != 1 or len(meshes) < 2:
        return ()
    columns = list(zip(*(mesh.ranks for mesh in meshes)))
    parts = (group[np.isin(group, column)] for column in columns for group in equal)
    return tuple(group for group in parts if len(group) > 1)


class ReplicaProofs(NamedTuple):
    """What steps showed of parameters beyond their setup, as {(path, name): groups of ranks}."""

    tied: dict[tuple[str, str], tuple[Array, ...]]
    """Ranks of several parts that stepped with one gradient of it."""
    proven: dict[tuple[str, str], tuple[Array, ...]]
    """Ranks on which a constant is known to be a replica."""


class InferredReplicas:
    """What the setup of one incarnation says about plain parameters, and whose data is whose."""

    def __init__(self, setup: StepView | None) -> None:
        self._equal: dict[tuple[str, str], tuple[Array, ...]] = {}
        """{(path, name): groups of equal ranks} of plain parameters."""
        self._constant: set[tuple[str, str]] = set()
        self._shared: dict[tuple[str, str], SlotValues] = {}
        self.sharded_paths: frozenset[str] = frozenset()
        self.wrappers: frozenset[str] = frozenset()
        self.wrapped: frozenset[str] = frozenset()
        """Paths of what DDP wraps, or is part of."""
        self.owners: dict[str, Array] = {}
        self.is_marked = False
        self._lines: tuple[Array, ...] = ()
        self._wrapped_lines: tuple[Array, ...] = ()
        """As `_lines`, but for frozen models of which DDP wraps nothing."""
        self._local_lines: tuple[Array, ...] = ()
        """As `_lines`, of the ranks' own pieces of DTensors too."""
        self._along: dict[str, dict[str, list[Placement]]] = {}
        self._meshes: dict[str, tuple[Mesh, ...]] = {}
        self._placed: dict[str, tuple[Array, ...]] = {}
        """{path of a module that owns DTensors: the ranks of each of their meshes}."""
        self._streams: list[tuple[int, Array]] = []
        """Width of an embedding's rows, or of a norm that DTensors replicate; ranks that hold all
        of it."""
        self._feeds: frozenset[tuple[RootPlace, RootPlace]] = frozenset()
        self._kinds: dict[int, _Part] = {}
        """{rank: class of its first root}, where ranks train other models under one path"""
        self._parts: dict[int, _Part] = {}
        if setup is not None:
            self._read(setup)

    def _read(self, setup: StepView) -> None:
        plain: list[SlotValues] = []
        local: list[SlotValues] = []
        cut: list[SlotValues] = []
        self.wrappers = frozenset(w for call in setup.calls for w in call.node.wrappers)
        self.wrapped = frozenset(call.path for call in setup.calls if DDP in call.node.wrappers)
        self.owners = {call.path: call.ranks for call in setup.calls if call.slots}
        kinds = (kind for call in setup.calls if not call.path for kind in call.node.classes)
        self._kinds = {rank: frozenset({(kind, 0)}) for ranks, kind in kinds for rank in ranks}
        self._parts = self._kinds
        for values in setup.parameters(Phase.SETUP):
            key = values.parameter
            is_plain = values.source in ("unknown", "marked")
            if values.source == "dtensor":
                view = values.views[0]
                meshes = self._meshes[view.mesh_name] = view.meshes
                by_axis = self._along.setdefault(view.mesh_name, {})
                for axis, placement in view.placements.items():
                    by_axis.setdefault(axis, []).append(placement)
                self._placed[key[0]] = tuple(np.array(sorted(m.ranks), np.int64) for m in meshes)
                self._equal[key] = _across(clusters(values), meshes)
                are_whole = [p.kind is PlacementKind.REPLICATE for p in view.placements.values()]
                if len(view.pieces[0].shape) == 1 and all(are_whole):
                    width = view.pieces[0].shape[0]
                    self._streams += [(width, ranks) for ranks in self._placed[key[0]]]
            elif values.source == "marked":
                self.is_marked = True
                self._equal[key] = _across(clusters(values), values.views[0].meshes)
            elif is_plain:
                self._equal[key] = clusters(values)
            else:
                continue
            if values.is_constant:
                self._constant.add(key)
                continue
            is_run = values.source == "marked" and FSDP1_AXIS in values.views[0].placements
            if key[1] == FSDP1_FLAT or is_run:
                cut.append(values)
                continue
            local.append(values)
            shape = values.views[0].pieces[0].shape
            if "embedding" in values.call.node.class_name.lower() and len(shape) == 2:
                self._streams += [(shape[1], group) for group in self._equal[key]]
            if is_plain:
                plain.append(values)
                if values.agree(values.ranks) is False:
                    self._shared[key] = values
        self._lines, self._local_lines = _equal_lines(plain, cut), _equal_lines(local, cut)
        roots = {root_of(path) for path in self.wrapped}
        sent = [v for v in plain if root_of(v.call.path) in roots or v.needs_gradient]
        self._wrapped_lines = _equal_lines(sent, cut)
        self.sharded_paths = frozenset(owner for owner, _ in self._shared)

    @property
    def is_placed(self) -> bool:
        """True where a module owns DTensors."""
        return bool(self._placed)

    @cached_property
    def placed_below(self) -> frozenset[str]:
        """Paths of modules that own DTensors, or hold one that does."""
        names = (owner.split(".") for owner in self._placed)
        return frozenset(".".join(path[:n]) for path in names for n in range(len(path) + 1))

    @property
    def is_wrapped(self) -> bool:
        """True where a framework reduces gradients: by wrappers, marks, or DTensors."""
        return bool(self.wrappers) or self.is_placed or self.is_marked

    @property
    def lines(self) -> tuple[Array, ...]:
        """Ranks with equal plain parameters that are no stages of one model."""
        return self._of_parts(self._lines)

    def _of_parts(self, lines: Iterable[Array]) -> tuple[Array, ...]:
        return tuple(part for line in lines for part in self.by_part(line))

    def unlike_in(self, root: str) -> list[SlotValues]:
        """Return the plain parameters of a root that differ at setup and are no constants."""
        return [v for v in self._shared.values() if root_of(v.call.path) == root]

    def data_lines(self, layouts: Layouts) -> dict[str, tuple[Array, ...]]:
        """Return {source: lines of ranks} of axes along which batches should differ: data-parallel
        axes by their name in a layout file or in FSDP's mesh, axes along which FSDP cut every
        parameter, and the replicas of a DDP model or of a model with marked parameters."""
        lines_by_source: dict[str, tuple[Array, ...]] = {}
        declared = layouts.mesh
        if declared is not None:
            for axis, extent in zip(declared.axes, declared.shape):
                if named_as(axis) is AxisName.DATA and extent > 1:
                    lines_by_source[f"declared axis {axis}"] = sorted_lines(declared, [axis])
        for name, by_axis in self._along.items() if "FSDP2" in self.wrappers else ():
            for axis, placements in by_axis.items():
                if is_fsdp_axis(axis, placements, len(by_axis)):
                    meshes = self._meshes[name]
                    lines = (line for mesh in meshes for line in sorted_lines(mesh, [axis]))
                    lines_by_source[f"FSDP's axis {axis}"] = _wide(lines)
        sent_alike = self._of_parts(self._wrapped_lines) if DDP in self.wrappers else ()
        if sent_alike:
            lines_by_source[DDP] = sent_alike
        elif self.is_marked and self.lines:
            lines_by_source["replicas of marked parameters"] = self.lines
        return lines_by_source

    def with_stages(self, feeds: Set[tuple[RootPlace, RootPlace]]) -> InferredReplicas:
        """Return the same, knowing also which root hands its output to which other in a step."""
        if feeds <= self._feeds:
            return self
        replicas = copy.copy(self)
        replicas._feeds = self._feeds | feeds
        parts, kinds = _parts(replicas._feeds), self._kinds
        none: _Part = frozenset()
        replicas._parts = {
            rank: parts.get(rank, none) | kinds.get(rank, none) for rank in (*parts, *kinds)
        }
        return replicas

    def is_cut_between(self, path: str, ranks: Array) -> bool:
        """True where a plain parameter of the module itself is another one on each of the ranks."""
        shared = (values for (owner, _), values in self._shared.items() if owner == path)
        return any(
            (at := values.at(ranks)).min() >= 0
            and len(set(values.hashes[at].tolist())) == len(ranks)
            for values in shared
        )

    def same(self, values: SlotValues, step_view: StepView, proofs: ReplicaProofs) -> Same | None:
        """Return which ranks' parameter or gradient should be equal though no layout says it; what
        the value proves is added to `proofs`."""
        key = values.parameter
        groups = self._equal.get(key)
        if values.source not in ("unknown", "dtensor", "marked") or not groups:
            return None
        if values.source == "dtensor" and key[0] not in self._placed:  # it was whole at setup
            groups = _across(groups, values.views[0].meshes)
        ties = proofs.tied.get(key, ())
        if self._parts and values.call.phase is Phase.GRADS and not values.is_constant:
            # only a reduction makes stages step with one gradient of a parameter
            stages = [(g, [*self.by_part(g, ties, fewest=1)]) for g in clusters(values)]
            ties = proofs.tied[key] = (*ties, *(g for g, parts in stages if len(parts) > 1))
        replicas = [part for group in groups for part in self.by_part(group, ties)]
        is_one_element = key in self._constant and not (values.counts > 1).any()
        replicas = [
            trusted
            for part in replicas
            for trusted in (
                *(
                    self._trusted(part, values, step_view, proofs)
                    if key in self._constant or self.is_cut_between(key[0], part)
                    else (part,)
                ),
                *(self._computed_as_one(key[0], part, step_view) if is_one_element else ()),
            )
        ]
        return Same(groups=tuple(replicas), source="inferred") if replicas else None

    def by_part(self, ranks: Array, ties: Iterable[Array] = (), fewest: int = 2) -> Iterator[Array]:
        """Yield those of the ranks that compute the same part of a model, or share a parameter, for
        which some groups of ranks are tied."""
        if not self._parts:
            yield ranks
            return
        parts = {rank: self._parts.get(rank) for rank in ranks.tolist()}
        for tied in ties:
            tie = [parts[rank] for rank in tied.tolist() if rank in parts]
            parts = {rank: tie[0] if part in tie else part for rank, part in parts.items()}
        for part in dict.fromkeys(parts.values()):
            members = [rank for rank, rank_part in parts.items() if rank_part == part]
            if len(members) >= fewest:
                yield np.array(members, np.int64)

    def _trusted(
        self, group: Array, values: SlotValues, step_view: StepView, proofs: ReplicaProofs
    ) -> Iterator[Array]:
        """Yield the parts of a group of equal constants that are known to be replicas."""
        local = (part for line in self._local_lines for part in self.by_part(line))
        lines = (*self.lines, *local)
        if not self.wrappers:  # ranks with one batch may hold columns that begin at zero
            lines = tuple(line for line in lines if not step_view.has_same_inputs(line))
        is_line = any(len(group) == len(line) and (group == line).all() for line in lines)
        if is_line or self._is_proven(group, values, step_view, proofs):
            yield group
            return
        unproven = group
        for line in lines:
            on_line = unproven[np.isin(unproven, line)]
            if len(on_line) > 1:
                yield on_line
                unproven = unproven[~np.isin(unproven, line)]
        if 1 < len(unproven) < len(group) and self._is_proven(unproven, values, step_view, proofs):
            yield unproven

    def _is_proven(
        self, ranks: Array, values: SlotValues, step_view: StepView, proofs: ReplicaProofs
    ) -> bool:
        """True where constants showed to be replicas on all of these ranks, now or before."""
        key = values.parameter
        if any(np.array_equal(proven, ranks) for proven in proofs.proven.get(key, ())):
            return True
        family: Sequence[SlotValues] = ()
        if values.call.phase is Phase.GRADS:
            siblings = sibling_path(values.call.path), values.slot
            family = step_view.gradient_families.get(siblings, ())
        is_shown = (
            self._is_of_each_column(values, ranks)
            or is_handed_the_same(step_view, key[0], ranks)
            or any(
                not v.is_constant
                and v.agree(ranks) is True
                and np.array_equal(v.counts[v.at(ranks)], values.counts[values.at(ranks)])
                for v in family
            )
        )
        if is_shown:
            proofs.proven[key] = (*proofs.proven.get(key, ()), ranks)
        return is_shown

    def _is_of_each_column(self, values: SlotValues, ranks: Array) -> bool:
        """True for what a norm, or a scale in a model of DTensors, holds of each of the model's
        columns. An expert's norm is as wide, and belongs to the rank that has the expert."""
        is_norm = "norm" in values.call.node.class_name.lower()
        is_line = self.is_placed and len(values.views[0].pieces[0].shape) == 1
        if not (is_norm or is_line) or _OF_ONE_RANK.search(values.call.path.lower()):
            return False
        parent = values.call.path.rpartition(".")[0]
        if any(owner.rpartition(".")[0] == parent for owner, _ in self._shared):
            return False  # what stands beside it is another one on each rank, so it may be as well
        counts = set(values.counts[values.at(ranks)].tolist())
        return any(
            counts == {width} and np.isin(ranks, holders).all() for width, holders in self._streams
        )

    def _computed_as_one(self, path: str, group: Array, step_view: StepView) -> Iterator[Array]:
        """Yield the ranks of a mesh on which the innermost module of DTensors had one input."""
        outer = path
        while outer:
            outer = outer.rpartition(".")[0]
            below = f"{outer}." if outer else ""
            inside = [meshes for owner, meshes in self._placed.items() if owner.startswith(below)]
            if inside:
                is_one = not any(owner.startswith(below) for owner, _ in self._shared)
                for mesh in inside[0] if is_one else ():
                    ranks = group[np.isin(group, mesh)]
                    if len(ranks) > 1 and is_handed_the_same(step_view, outer, ranks):
                        yield ranks
                return


def _parts(feeds: Collection[tuple[RootPlace, RootPlace]]) -> dict[int, _Part]:
    takers = grouped(feeds)
    waits_for = Counter(receiver for _, receiver in feeds)
    depths = {place: 0 for feed in feeds for place in feed}
    ready = [place for place in depths if not waits_for[place]]
    while ready:
        place = ready.pop()
        for receiver in takers.get(place, ()):
            depths[receiver] = max(depths[receiver], depths[place] + 1)
            waits_for[receiver] -= 1
            if not waits_for[receiver]:
                ready.append(receiver)
    places_of: dict[int, set[tuple[str, int]]] = {}
    for (path, rank), depth in depths.items():
        is_in_circle = waits_for[path, rank] > 0  # nothing tells where it stands: like no other
        places_of.setdefault(rank, set()).add((path, -1 - rank if is_in_circle else depth))
    return {rank: frozenset(places) for rank, places in places_of.items()}


def is_handed_the_same(step_view: StepView, path: str, ranks: Array) -> bool:
    """True where a module got the same inputs and gradients of its outputs on these ranks."""
    handed = step_view.handed(path)
    phases = {values.call.phase for values in handed}
    return len(phases) == 2 and all(values.agree(ranks) for values in handed)


def differing_groups(values: SlotValues, groups: tuple[Array, ...]) -> tuple[list[Array], bool]:
    """Return the groups that differ among ranks that recorded it, and whether any was compared."""
    if len({len(group) for group in groups}) == 1:
        matrix = np.stack(groups)
        answers = values.agreements(matrix)
        if (answers >= 0).all() or values.are_known(matrix):
            return [groups[row] for row in np.flatnonzero(answers == 0)], True
    differing, is_applied = [], False
    for group in groups:
        places = values.at(group)
        present = group[(places >= 0) & values.is_known[np.maximum(places, 0)]]
        if len(present) > 1:
            answer = values.agree(present)
            is_applied |= answer is not None
            if answer is False:
                differing.append(present)
    return differing, is_applied


class ComparedReplicas(NamedTuple):
    """What replicas of one step hold."""

    values: list[tuple[SlotValues, Same, list[Array], bool]]
    """A value, the ranks that should hold the same of it, by layout and then by inference, those
    groups of them that differ, and whether any could be compared."""
    proofs: ReplicaProofs
    """Those of the steps before, and of this one."""


def compared_replicas(
    step_view: StepView, layouts: Layouts, replicas: InferredReplicas, before: ReplicaProofs
) -> ComparedReplicas:
    """Compare replicas in the order in which a step made them: an earlier value may prove what a
    later one needs. What collectives carry is held to what went in, not here."""
    compared, proofs = [], ReplicaProofs(dict(before.tied), dict(before.proven))
    for values in step_view.values(*frozenset(Phase) - {Phase.COLLECTIVE}):
        if layouts.is_own(values):
            continue
        placed, inferred = layouts.same(values), None
        is_of_one_mesh = placed is None or placed.source in ("dtensor", "marked")
        if is_of_one_mesh and values.slot.startswith(("param:", "grad:")):
            inferred = replicas.same(values, step_view, proofs)
        for replica_layout in (placed, inferred):
            if replica_layout is not None and (groups := replica_layout.groups):
                compared.append((values, replica_layout, *differing_groups(values, groups)))
    return ComparedReplicas(compared, proofs)
