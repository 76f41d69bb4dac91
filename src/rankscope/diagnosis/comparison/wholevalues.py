"""What the ranks of one trace hold of a value, as whole tensors: composed from digests alone.

How pieces make a whole is `assembly/combine.py`'s answer, by the plan of `layout/plan.py`. Ranks
whose plain values are bitwise the same hold one whole. What several ranks hold differently stays
several wholes: whether these are faulty replicas, batches of data-parallel ranks or shards that
nothing describes is decided where they are held to the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from rankscope.assembly.combine import CombinationPlan, apply_plan, plan_rows
from rankscope.diagnosis.comparison.lostranks import LostRanks
from rankscope.diagnosis.evidence.replicas import Layouts
from rankscope.diagnosis.evidence.stepview import Array, SlotValues
from rankscope.layout.declared import declared_pieces
from rankscope.layout.placement import Mesh, Placement
from rankscope.layout.plan import Piece
from rankscope.record.notes import NoteKind
from rankscope.record.statistics import STATISTICS
from rankscope.record.value import ValueFlag
from rankscope.record.wholestatistics import Combined
from rankscope.tensors.kept import held_pieces
from rankscope.tensors.proofs import proven_layout
from rankscope.tree.slotview import SlotView
from rankscope.tree.views import Value

NO_TENSOR: Final = "no tensor was there"
"""Why nothing is known of what is None on all ranks, as untrained gradients are."""
EVERY_PLACE: Final = -1
"""The place of a whole that holds the batches of all data-parallel ranks."""


@dataclass(eq=False, kw_only=True)
class Wholes:
    """The different whole tensors that ranks hold in one slot of one call."""

    rows: Array
    """[w] structured: hash and the statistics; NaN where a number is not known."""
    is_hashed: Array
    """[w] True where the hash is that of the whole."""
    places: Array
    """[w] data-parallel place; EVERY_PLACE for all of them."""
    members: list[Array]
    """Per whole the ranks that hold it or a piece of it."""
    samples: list[Array | None]
    """Per whole [n, K] float32 or float64, or None where single samples were not sketched."""
    is_described: bool
    """True where a layout says that these are whole; False for plain values."""
    reason: str = ""
    """Why some of the ranks' pieces could not be composed; "" where all were."""

    @cached_property
    def counts(self) -> list[int]:
        """Elements of each."""
        return self.rows["count"].tolist()  # type: ignore[no-any-return]

    @cached_property
    def sketches(self) -> Array:
        """[w, K] float64; NaN where pieces do not know their place."""
        return self.rows["sketch"]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeshPlan:
    """How the pieces of one mesh are composed."""

    at: Array
    """Positions of its ranks among those of the view."""
    ranks: Array
    plan: CombinationPlan | str
    pieces: tuple[Piece, ...]
    """Per row of the plan's index."""


class WholeValues:
    """Composes the values of one trace; plans are made once per layout and set of ranks."""

    def __init__(
        self, layouts: Layouts, lost: LostRanks, *, has_cut_dtensors: bool = False
    ) -> None:
        self._layouts, self._lost = layouts, lost
        self._is_proving = has_cut_dtensors
        self._plans: dict[Any, list[_MeshPlan]] = {}

    def of(self, values: SlotValues, places: Array | None) -> Wholes | str:
        """Return the wholes that ranks hold, or why there are none.

        Args:
            values: one slot of one call over all its ranks.
            places: [world] data-parallel place of every rank, for activations; None for what all
                data-parallel ranks have in common.
        """
        if not values.is_known.any():
            absent = (values.flags & int(ValueFlag.ABSENT)).astype(bool).all()
            notes = (fold.note for view in values.views for fold in view.pieces if fold.note)
            return NO_TENSOR if absent else ": ".join(("not digested", *itertools.islice(notes, 1)))
        unknown = self._lost.of(values)
        if unknown:
            return unknown
        made = _Making(values, places)
        reasons = []
        for view in values.views:
            meshes = self._meshes(view, values)
            if meshes is None:
                made.add_plain(view)
                continue
            for each in meshes:
                problem = made.add_placed(each)
                if problem:
                    reasons.append(problem)
        if not made.members:
            return reasons[0] if reasons else "not digested"
        return made.finished(reasons)

    def of_all(
        self, by_call: Mapping[int, SlotValues], places: Array | None
    ) -> dict[int, Wholes | str]:
        """Return the same of every micro-batch that has the slot."""
        return {call: self.of(values, places) for call, values in by_call.items()}

    def _meshes(self, view: SlotView, values: SlotValues) -> list[_MeshPlan] | None:
        """Return how the pieces of each mesh are composed; None of a value nothing describes."""
        own = np.array(view.ranks, np.int64)
        counts = values.counts[values.at(own)]
        placements = tuple(sorted((axis, str(p)) for axis, p in view.placements.items()))
        told = self._told(view, values)
        if not placements and told is None:
            return None
        key = (
            view.mesh_name, view.source, placements, view.global_shape,
            own.tobytes(), counts.tobytes(), told and (told[0], tuple(sorted(told[1].items()))),
        )  # fmt: skip
        if key not in self._plans:
            pieces = self.pieces(view, values)
            assert pieces is not None
            self._plans[key] = _plans_by_mesh(pieces, values.at(own), own)
        return self._plans[key]

    def pieces(self, view: SlotView, values: SlotValues) -> dict[int, Piece] | None:
        """Return what each rank holds of a whole; None of a value nothing describes."""
        told = self._told(view, values)
        if told is not None:
            return declared_pieces(*told, view.shapes())
        return held_pieces(view) if view.placements else None

    def _told(
        self, view: SlotView, values: SlotValues
    ) -> tuple[Mesh, Mapping[str, Placement]] | None:
        """Return how plain tensors lie on which mesh: as declared, else as far as that is proven;
        None where nothing tells it."""
        if view.placements:
            return None
        declared = self._layouts.placements(values.call.path, values.slot)
        if declared and self._layouts.mesh is not None:
            return self._layouts.mesh, declared
        is_activation = values.call.phase.facts.is_activation
        if not (self._is_proving and is_activation and len({*values.hashes.tolist()}) > 1):
            return None
        return proven_layout(Value((view,), values.call.node), self._layouts.mesh)


def _plans_by_mesh(pieces: Mapping[int, Piece], at: Array, ranks: Array) -> list[_MeshPlan]:
    by_mesh: dict[Mesh | None, list[int]] = {}
    for index, rank in enumerate(ranks.tolist()):
        if rank in pieces:
            by_mesh.setdefault(pieces[rank].layout.mesh, []).append(index)
    found = []
    for mesh, members in by_mesh.items():
        held = [(int(ranks[index]), pieces[int(ranks[index])]) for index in members]
        refusal = next((piece.refusal for _, piece in held if piece.refusal), "")
        whole = held[0][1].global_shape
        plan: CombinationPlan | str
        if refusal:
            plan = refusal
        elif mesh is None or whole is None:
            plan = "layout unknown"
        else:
            plan = plan_rows(held)
        rows = [] if isinstance(plan, str) else plan.index[:, 0].tolist()
        firsts = tuple(held[row][1] for row in rows)
        found.append(_MeshPlan(at=at[members], ranks=ranks[members], plan=plan, pieces=firsts))
    return found


class _Making:
    """Collects the wholes of one slot."""

    def __init__(self, values: SlotValues, places: Array | None) -> None:
        self._values, self._places = values, places
        self._digests = values.digests()
        self._samples = values.call.node.step["samples.sketch"]
        self._first = values.column("sample_row")
        self._count = values.column("sample_count")
        self._dim = values.column("sample_dim")
        self._rows: list[Array] = []
        self._hashed: list[Array] = []
        self._of: list[Array] = []
        self._kept: list[Array | None] = []
        self._is_described = True
        self.members: list[Array] = []

    def _place_of(self, ranks: Array) -> int:
        if self._places is None:
            return 0
        own = self._places[ranks]
        return int(own[0]) if (own == own[0]).all() else EVERY_PLACE

    def add_plain(self, view: SlotView) -> None:
        """Take values that nothing describes: those that are bitwise the same are one."""
        self._is_described = False
        at = self._values.at(np.array(view.ranks, np.int64))
        self.add_alike(at[self._values.is_known[at]])

    def add_alike(self, at: Array) -> None:
        """Take values of which each is a whole: those that are bitwise the same are one."""
        if not len(at):
            return
        ranks = self._values.ranks[at].astype(np.int64)
        places = np.zeros(len(at), np.int64) if self._places is None else self._places[ranks]
        hashes, counts = self._values.hashes[at], self._values.counts[at]
        order = np.lexsort((ranks, counts, hashes, places))
        keys = np.stack([places[order].astype(np.uint64), hashes[order], counts[order]])
        starts = np.flatnonzero(np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(0)])
        first = order[starts]
        by_rank = np.argsort(ranks[first])
        self._rows.append(self._digests[at[first[by_rank]]])
        self._hashed.append(np.ones(len(first), bool))
        self._of.append(places[first[by_rank]])
        sorted_ranks, edges = ranks[order], [*starts.tolist(), len(order)]
        # of ranks that hold the same, one may have kept its samples
        rows = np.maximum.reduceat(self._first[at][order], starts)[by_rank].tolist()
        sizes = np.maximum.reduceat(self._count[at][order], starts)[by_rank].tolist()
        for group, row, size in zip(by_rank.tolist(), rows, sizes):
            self.members.append(sorted_ranks[edges[group] : edges[group + 1]])
            is_kept = row >= 0 and self._places is not None
            self._kept.append(self._samples[row : row + size] if is_kept else None)

    def add_placed(self, mesh: _MeshPlan) -> str:
        """Take the pieces of one mesh; return why they make no whole, "" where they do."""
        plan = mesh.plan
        if isinstance(plan, str):
            return plan
        if not self._values.is_known[mesh.at].all():
            return "not digested on some ranks"
        if len(plan.index) == 1 and not plan.is_partial:  # every rank holds the whole
            self.add_alike(mesh.at)
            return ""
        found = apply_plan(plan, self._digests[mesh.at])
        if found.note is not None and found.note.kind is NoteKind.REPLICAS_DIFFER:
            for column in range(plan.index.shape[1]):
                own = replace(plan, index=plan.index[:, column : column + 1])
                self._add_combined(mesh, own, apply_plan(own, self._digests[mesh.at]))
            return ""
        if not found.is_known:
            return str(found.note)
        self._add_combined(mesh, plan, found)
        return ""

    def _add_combined(self, mesh: _MeshPlan, plan: CombinationPlan, found: Combined) -> None:
        self._rows.append(combined_row(found, self._digests.dtype)[None])
        self._hashed.append(np.zeros(1, bool))
        ranks = mesh.ranks[np.unique(plan.index)]
        self.members.append(np.sort(ranks))
        self._of.append(np.array([self._place_of(ranks)]))
        self._kept.append(self._composed_samples(mesh, plan) if plan.has_offsets else None)

    def _composed_samples(self, mesh: _MeshPlan, plan: CombinationPlan) -> Array | None:
        """Return the samples of a whole from those of its pieces; None where a piece has none."""
        if self._places is None:
            return None
        whole: Array | None = None
        for row, piece in zip(plan.index, mesh.pieces):
            at, ranges, shape = mesh.at[row], piece.ranges, piece.global_shape or ()
            at = at[self._first[at] >= 0]
            if ranges is None:
                return None
            if not len(at):
                if any(not dim for dim in ranges):  # an empty piece
                    continue
                return None
            dim = int(self._dim[at[0]])
            if dim >= len(shape):
                return None
            if whole is None:
                whole = np.zeros((shape[dim], self._samples.shape[1]))
            own = np.concatenate([np.arange(a, b) for a, b in ranges[dim]])
            first, count = int(self._first[at[0]]), int(self._count[at[0]])
            if count != len(own):
                return None
            whole[own] += self._samples[first : first + count] / plan.divisor
        return whole

    def finished(self, reasons: Sequence[str]) -> Wholes:
        """Return what was collected."""
        rows = self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)
        return Wholes(
            rows=rows,
            is_hashed=np.concatenate(self._hashed),
            places=np.concatenate(self._of),
            members=self.members,
            samples=self._kept,
            is_described=self._is_described,
            reason=reasons[0] if reasons else "",
        )


def combined_row(found: Combined, dtype: np.dtype[Any]) -> Array:
    """Return what was combined as a structured digest without a hash."""
    row = np.zeros((), dtype)
    for each in STATISTICS:
        number = found.number(each.name)
        row[each.name] = number if number is not None else 0 if each.is_count else np.nan
    row["sketch"] = np.nan if found.sketch is None else found.sketch
    return row
