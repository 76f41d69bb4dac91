"""What the ranks of one trace hold of a value, as whole tensors: composed from digests alone.

How pieces make a whole is `tree/assembly/combine.py`'s answer, by the plan of `layout/plan.py`.
Ranks whose plain values are bitwise the same hold one whole. What several ranks hold differently
stays several wholes: whether these are faulty replicas, batches of data-parallel ranks or shards
that nothing describes is decided where they are held to the reference.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import whole_shape
from rankscope.diagnosis.evidence.lastcalls import ORDERLY
from rankscope.diagnosis.evidence.replicas import Layouts
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped
from rankscope.layout.declared import declared_pieces
from rankscope.layout.placement import Mesh, Placement
from rankscope.layout.plan import Piece
from rankscope.record.call import Mode
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.sketchfactors import factors
from rankscope.record.statistics import STATISTICS, Combined
from rankscope.record.value import ValueFlag
from rankscope.tree.assembly.combine import CombinationPlan, apply_plan, apply_to_all, plan_rows
from rankscope.tree.slotview import SlotView
from rankscope.tree.summary import endings
from rankscope.tree.tensors.kept import held_pieces
from rankscope.tree.tensors.proofs import proven_layout
from rankscope.tree.views import Node, Trace, Value

NO_TENSOR: Final = "no tensor was there"
"""Said where a value is None on all ranks, as untrained gradients are."""
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
    samples: list[Array | None]
    """Per whole [n, K] float32 or float64, or None where single samples were not sketched."""
    is_described: bool
    """True where a layout says that these are whole; False for plain values."""
    reason: str = ""
    declared: Wholes | None = None
    """What a layout file makes of plain values whose pieces have no sketch of the whole and were
    not kept: statistics alone, and less than the pieces may tell by themselves."""

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
        slot_values = _HeldValues(values, places)
        wholes: list[Wholes] = []
        reasons = []
        for view in values.views:
            meshes = self._meshes(view, values)
            placed = [slot_values.placed(mesh) for mesh in meshes or ()]
            refused = [reason for reason in placed if isinstance(reason, str)]
            composed = [whole for mesh in placed if not isinstance(mesh, str) for whole in mesh]
            is_told = not refused and not any(np.isnan(w.sketches).any() for w in composed)
            if meshes is None or not (is_told or view.placements or view.references()):
                at = values.at(np.array(view.ranks, np.int64))
                plain = slot_values.alike(at[values.is_known[at]], is_described=False)
                if plain and composed and not refused and len(values.views) == 1:
                    plain[0].declared = _together(composed, "")
                composed, refused = plain, []
            wholes += composed
            reasons += refused
        reason = reasons[0] if reasons else ""
        return _together(wholes, reason) if wholes else reason or "not digested"

    def of_all(
        self, by_call: Mapping[int, SlotValues], places: Array | None
    ) -> dict[int, Wholes | str]:
        """Return the same of every micro-batch that has the slot."""
        return {call: self.of(values, places) for call, values in by_call.items()}

    def _meshes(self, view: SlotView, values: SlotValues) -> list[_MeshPlan] | None:
        """Return how the pieces of each mesh are composed; None of a value nothing describes."""
        is_all = len(values.views) == 1
        ranks = values.ranks.astype(np.int64) if is_all else np.array(view.ranks, np.int64)
        counts = values.counts if is_all else values.counts[values.at(ranks)]
        placements = tuple(sorted((axis, str(p)) for axis, p in view.placements.items()))
        layout = self._told(view, values)
        if not placements and layout is None:
            return None
        facts = layout and (layout[0], tuple(sorted(layout[1].items())))
        form = (view.mesh_name, view.source, placements, view.global_shape)
        key = (*form, ranks.tobytes(), counts.tobytes(), facts)
        if key not in self._plans:
            pieces = self.pieces(view, values)
            assert pieces is not None
            self._plans[key] = _plans_by_mesh(pieces, values.at(ranks), ranks)
        return self._plans[key]

    def pieces(self, view: SlotView, values: SlotValues) -> dict[int, Piece] | None:
        """Return what each rank holds of a whole; None of a value nothing describes."""
        layout = self._told(view, values)
        if layout is not None:
            return declared_pieces(*layout, view.shapes())
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
    plans = []
    for mesh, members in by_mesh.items():
        rank_pieces = [(rank, pieces[rank]) for rank in ranks[members].tolist()]
        plan: CombinationPlan | str = next((p.refusal for _, p in rank_pieces if p.refusal), "")
        if not plan:
            is_known = mesh is not None and rank_pieces[0][1].global_shape is not None
            plan = plan_rows(rank_pieces) if is_known else "layout unknown"
        rows = [] if isinstance(plan, str) else plan.index[:, 0].tolist()
        row_pieces = tuple(rank_pieces[row][1] for row in rows)
        plans.append(_MeshPlan(at=at[members], ranks=ranks[members], plan=plan, pieces=row_pieces))
    return plans


class _HeldValues:
    """What ranks hold in one slot of one call, on its way to wholes."""

    def __init__(self, values: SlotValues, places: Array | None) -> None:
        self._values, self._places = values, places
        self._digests = values.digests()
        self._samples = values.call.node.step["samples.sketch"]
        self._first = values.column("sample_row")
        self._count = values.column("sample_count")

    def alike(self, at: Array, *, is_described: bool) -> list[Wholes]:
        """Return values that are wholes by themselves, one for all ranks with the same bytes."""
        if not len(at):
            return []
        ranks = self._values.ranks[at].astype(np.int64)
        places = np.zeros(len(at), np.int64) if self._places is None else self._places[ranks]
        hashes, counts = self._values.hashes[at], self._values.counts[at]
        order = np.lexsort((ranks, counts, hashes, places))
        keys = np.stack([places[order].astype(np.uint64), hashes[order], counts[order]])
        starts = np.flatnonzero(np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(0)])
        first = order[starts]
        by_rank = np.argsort(ranks[first])
        holders = np.split(ranks[order], starts[1:])
        # of ranks that hold the same, one may have kept its samples
        rows = np.maximum.reduceat(self._first[at][order], starts)[by_rank].tolist()
        sizes = np.maximum.reduceat(self._count[at][order], starts)[by_rank].tolist()
        has_samples = self._places is not None
        return [
            Wholes(
                rows=self._digests[at[first[by_rank]]],
                is_hashed=np.ones(len(first), bool),
                places=places[first[by_rank]],
                members=[holders[group] for group in by_rank.tolist()],
                samples=[
                    self._samples[row : row + size] if row >= 0 and has_samples else None
                    for row, size in zip(rows, sizes)
                ],
                is_described=is_described,
            )
        ]

    def placed(self, mesh: _MeshPlan) -> list[Wholes] | str:
        """Return what the pieces of one mesh make, or why they make no whole."""
        plan = mesh.plan
        if isinstance(plan, str):
            return plan
        if not self._values.is_known[mesh.at].all():
            return "not digested on some ranks"
        if len(plan.index) == 1 and not plan.is_partial:  # every rank holds the whole
            return self.alike(mesh.at, is_described=True)
        rows = self._digests[mesh.at]
        combined = apply_plan(plan, rows)
        if combined.note is not None and combined.note.kind is NoteKind.REPLICAS_DIFFER:
            return self._apart(mesh, plan, rows)
        return [self._composed(mesh, plan, combined)] if combined.is_known else str(combined.note)

    def _apart(self, mesh: _MeshPlan, plan: CombinationPlan, rows: Array) -> list[Wholes]:
        """Return the wholes of replicas that differ: one for those of a place with the same bytes.

        Args:
            rows: [ranks of the mesh] digests.
        """
        keys = [rows["hash"][plan.index], rows["count"][plan.index]]
        keys += [] if self._places is None else [self._places[mesh.ranks[plan.index]]]
        columns = grouped(
            (tuple(key[:, column].tobytes() for key in keys), column)
            for column in range(plan.index.shape[1])
        ).values()
        firsts = plan.index[:, [group[0] for group in columns]]
        of_one = replace(plan, index=np.arange(len(plan.index))[:, None])
        return [
            self._composed(mesh, replace(plan, index=plan.index[:, group]), combined)
            for group, combined in zip(columns, apply_to_all(of_one, rows[firsts.T]))
        ]

    def _composed(self, mesh: _MeshPlan, plan: CombinationPlan, combined: Combined) -> Wholes:
        members = np.sort(mesh.ranks[np.unique(plan.index)])
        places = np.zeros(1, np.int64) if self._places is None else self._places[members]
        is_one_place = bool((places == places[0]).all())
        return Wholes(
            rows=combined_row(combined, self._digests.dtype)[None],
            is_hashed=np.zeros(1, bool),
            places=places[:1] if is_one_place else np.array([EVERY_PLACE]),
            members=[members],
            samples=[self._composed_samples(mesh, plan) if plan.has_offsets else None],
            is_described=True,
        )

    def _composed_samples(self, mesh: _MeshPlan, plan: CombinationPlan) -> Array | None:
        """Return the samples of a whole; None where a piece has none."""
        if self._places is None:
            return None
        dims = self._values.column("sample_dim")
        samples: Array | None = None
        for row, piece in zip(plan.index, mesh.pieces):
            at, ranges, shape = mesh.at[row], piece.ranges, piece.global_shape or ()
            at = at[self._first[at] >= 0]
            if ranges is None:
                return None
            if not len(at):
                if any(not dim for dim in ranges):  # an empty piece
                    continue
                return None
            dim = int(dims[at[0]])
            if dim >= len(shape):
                return None
            if samples is None:
                samples = np.zeros((shape[dim], self._samples.shape[1]))
            rows = np.concatenate([np.arange(a, b) for a, b in ranges[dim]])
            first, count = int(self._first[at[0]]), int(self._count[at[0]])
            if count != len(rows):
                return None
            samples[rows] += self._samples[first : first + count] / plan.divisor
        return samples


def _together(wholes: Sequence[Wholes], reason: str) -> Wholes:
    """Return the wholes of several meshes, or of values that none describes, as those of a slot."""
    if len(wholes) == 1:
        wholes[0].reason = reason
        return wholes[0]
    return Wholes(
        rows=np.concatenate([part.rows for part in wholes]),
        is_hashed=np.concatenate([part.is_hashed for part in wholes]),
        places=np.concatenate([part.places for part in wholes]),
        members=[ranks for part in wholes for ranks in part.members],
        samples=[sketches for part in wholes for sketches in part.samples],
        is_described=all(part.is_described for part in wholes),
        reason=reason,
    )


def combined_row(combined: Combined, dtype: np.dtype[Any]) -> Array:
    """Return what was combined as a structured digest without a hash."""
    row = np.zeros((), dtype)
    for statistic in STATISTICS:
        number = combined.number(statistic.name)
        row[statistic.name] = number if number is not None else 0 if statistic.is_count else np.nan
    row["sketch"] = np.nan if combined.sketch is None else combined.sketch
    return row


# ---- rollouts ------------------------------------------------------------------------------------

# Forwards of the same tokens may have been made in other ways: a training step beside a forward
# without gradients, one call of a whole sequence beside calls of a part and then of single tokens.
# A token's part of a sketch is the sketch of that token alone, times the factor of its position
# over that of position 0: factors of dims are independent. So calls of one token each add up to the
# sketch of the sequence; of calls with several tokens behind the first one they do not.
_TOKENS_DIM: Final = 1


def token_counts(step_view: StepView) -> list[int]:
    """Return the tokens of a sample in every root call; [] where inputs have no dim for them."""
    counts: dict[int, int] = {}
    for call in step_view.roots:
        for values in call.inputs:
            shape = whole_shape(values)
            if call.path == "" and len(shape) > _TOKENS_DIM:
                counts.setdefault(call.micro_batch or 0, shape[_TOKENS_DIM])
    return [counts[micro_batch] for micro_batch in sorted(counts)]


class TokenWholes(WholeValues):
    """Composes what the calls of one rollout hold, which were given so many tokens each."""

    def __init__(self, layouts: Layouts, lost: LostRanks, tokens: Sequence[int]) -> None:
        super().__init__(layouts, lost)
        self._tokens = tokens

    def of_all(
        self, by_call: Mapping[int, SlotValues], places: Array | None
    ) -> dict[int, Wholes | str]:
        """Return the wholes of all calls together, as those of call 0."""
        if set(by_call) != set(range(len(self._tokens))):
            return {0: "not in every call of the rollout"}
        calls = [by_call[index] for index in range(len(self._tokens))]
        shapes = [whole_shape(values) for values in calls]
        shapes_of_token = {shape[:_TOKENS_DIM] + shape[_TOKENS_DIM + 1 :] for shape in shapes}
        counts = [shape[_TOKENS_DIM : _TOKENS_DIM + 1] for shape in shapes]
        if len(shapes_of_token) != 1 or counts != [(count,) for count in self._tokens]:
            return {0: "no value of each token in every call of the rollout"}
        wholes: list[Wholes] = []
        for values in calls:
            whole_values = self.of(values, places)
            if isinstance(whole_values, str):
                return {0: whole_values}
            wholes.append(whole_values)
        return {0: self._joined(wholes)}

    def _joined(self, calls: list[Wholes]) -> Wholes | str:
        first = calls[0]
        for call in calls[1:]:
            same_places = np.array_equal(call.places, first.places)
            if not same_places or not all(map(np.array_equal, call.members, first.members)):
                return "ranks hold other values in some calls of the rollout"
        if any(count > 1 for count in self._tokens[1:]):
            return "several tokens at once behind the first call of the rollout"
        # [calls][K]: the factors of a call's position over those of position 0
        starts = [sum(self._tokens[:index]) for index in range(len(calls))]
        at = [factors(_TOKENS_DIM, ((n, n + 1),))[:, 0].astype(np.float64) for n in (0, *starts)]
        scales = [position / at[0] for position in at[1:]]
        plan = CombinationPlan(
            ranks=tuple(range(len(calls))),
            index=np.arange(len(calls))[:, None],
            is_partial=False,
            summands=1,
            divisor=1.0,
            has_offsets=True,
        )
        rows, samples = [], []
        for index in range(len(first)):
            parts = np.concatenate([wholes.rows[[index]] for wholes in calls])
            parts["sketch"] *= np.array(scales)
            rows.append(combined_row(apply_plan(plan, parts), first.rows.dtype)[None])
            sketches = [wholes.samples[index] for wholes in calls]
            scaled = [
                sketch * scale for sketch, scale in zip(sketches, scales) if sketch is not None
            ]
            is_whole = len(scaled) == len(calls) and len({len(wholes) for wholes in scaled}) == 1
            samples.append(np.sum(scaled, axis=0) if is_whole else None)
        reason = next((wholes.reason for wholes in calls if wholes.reason), "")
        is_hashed = np.zeros(len(first), bool)
        rows_of_all = np.concatenate(rows)
        return replace(first, rows=rows_of_all, is_hashed=is_hashed, samples=samples, reason=reason)


# ---- ranks that a trace lacks --------------------------------------------------------------------


_BROKEN_OFF: Final = "not all of its ranks came here before the run broke off"


class LostRanks:
    """What is unknown of one incarnation of a run."""

    def __init__(self, trace: Trace, incarnation: int) -> None:
        run, completeness = trace.run, trace.completeness
        self._trace = trace
        self.world = int(run["world_size"])
        self.untraced = frozenset(range(self.world)) - {entry["rank"] for entry in run["ranks"]}
        self.is_partial = bool(self.untraced)
        self.broken = sorted(
            entry["rank"]
            for entry in completeness["ranks"]
            if entry["incarnation"] == incarnation and entry["end"] not in ORDERLY
        )
        self._expected: defaultdict[str, set[int]] = defaultdict(set)
        """By path: the ranks that call the module."""
        last: defaultdict[Mode, dict[int, int]] = defaultdict(lambda: dict.fromkeys(self.broken, 0))
        for step in (*trace.setup, *trace.steps) if self.broken else ():
            if step.incarnation != incarnation:
                continue
            waiting: list[tuple[Node, frozenset[int]]] = [(n, frozenset()) for n in step.fresh()]
            for top, _ in waiting if not step.is_setup else ():
                ranks = last[step.mode]
                ranks.update((r, max(ranks[r], step.step)) for r in top.ranks if r in ranks)
            while waiting:
                node, stuck = waiting.pop()
                self._expected[node.path].update(node.ranks, stuck)
                # a rank that did not come back from a call may not have come to what is inside
                inside = [r for o in node.outcomes if not o.has_returned for r in o.ranks]
                waiting.extend((child, stuck.union(inside)) for child in node.children)
        self._cut_from = {mode: min(steps.values()) for mode, steps in last.items()}
        """The first step that a broken rank may have left."""
        was = "was" if len(self.untraced) == 1 else "were"
        self._untraced, self._was_not = ranks_named(sorted(self.untraced)), f"{was} not traced"

    def is_cut(self, mode: Mode, step: int) -> bool:
        """True for a step that some rank may have left before its end."""
        return mode in self._cut_from and step >= self._cut_from[mode]

    def of(self, values: SlotValues) -> str:
        """Return why nothing can be said of a value; "" where nothing of it is missing."""
        if self.is_partial:
            return f"{self._untraced} of the run {self._was_not}"
        call = values.call
        if call.phase is Phase.SETUP or not self.is_cut(call.node.head.mode, call.node.head.step):
            return ""
        came = set(values.ranks[values.is_known].tolist())
        return _BROKEN_OFF if self._expected[call.path] - came else ""

    def lacks(self, name: str) -> str:
        """Return what of this trace (REF or TEST) is unknown, and what to do; "" for nothing."""
        if self.is_partial:
            return (
                f"{self._untraced} of {self.world} {self._was_not} in {name}: trace all ranks, or "
                "the same ranks of the same topology in both runs"
            )
        if not self.broken:
            return ""
        ended = "; ".join(endings(self._trace.completeness))
        return f"{name} broke off ({ended}): no difference in what was compared before"

    def notes(self, name: str) -> list[str]:
        """Return how ranks that raised an exception say they ended."""
        notes = []
        for entry in self._trace.completeness["ranks"]:
            raised = entry.get("raised")
            if entry["rank"] in self.broken and raised:
                text = str(raised.get("error", "")).partition("\n")[0]
                where = f" ({raised['where']})" if raised.get("where") else ""
                notes.append(f"{name}: rank {entry['rank']} raised {text}{where}")
        return notes[:4]
