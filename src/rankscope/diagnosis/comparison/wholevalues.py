"""What the ranks of one trace hold of a value, as whole tensors: composed from digests alone.

How pieces make a whole is `tree/assembly/combine.py`'s answer, by the plan of `layout/plan.py`.
Ranks whose plain values are bitwise the same hold one whole. What several ranks hold differently
stays several wholes: whether these are faulty replicas, batches of data-parallel ranks or shards
that nothing describes is decided where they are held to the reference.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from rankscope.diagnosis.comparison.alignment import whole_shape
from rankscope.diagnosis.evidence.lastcalls import ORDERLY
from rankscope.diagnosis.evidence.replicas import Layouts
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, are_known
from rankscope.layout.layoutfile import declared_pieces
from rankscope.layout.placement import Mesh, Placement
from rankscope.layout.plan import Piece
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.sketchfactors import factors
from rankscope.record.statistics import STATISTICS
from rankscope.record.texts import endings
from rankscope.record.value import ValueFlag
from rankscope.tree.assembly.combine import (
    CombinationPlan,
    combine,
    plan_rows,
    replicas_differ,
)
from rankscope.tree.assembly.tables import factorize
from rankscope.tree.slotview import SlotView
from rankscope.tree.step import StepColumns, run_starts
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

    def without_sketches(self) -> Wholes:
        """Return the same, known by its bytes and its statistics alone."""
        rows = self.rows.copy()
        rows["sketch"] = np.nan
        return replace(self, rows=rows, samples=[None] * len(rows), declared=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeshPlan:
    """How the pieces of one mesh are composed."""

    at: Array
    """Positions of its ranks among those of the view."""
    ranks: Array
    plan: CombinationPlan | str
    pieces: tuple[Piece, ...]
    """Per row of the plan's index."""


class _ComposedView(NamedTuple):
    """What the ranks of one view make of a slot."""

    places: Array | None
    """For which it was composed."""
    wholes: list[Wholes]
    reasons: list[str]
    """Why ranks of some meshes make none."""


class WholeValues:
    """Composes the values of one trace; plans are made once per layout and set of ranks."""

    def __init__(
        self, layouts: Layouts, lost: LostRanks, *, has_cut_dtensors: bool = False
    ) -> None:
        self._layouts, self._lost = layouts, lost
        self._is_proving = has_cut_dtensors
        self._plans: dict[Any, list[_MeshPlan]] = {}
        self._composed: WeakKeyDictionary[StepColumns, dict[int, _ComposedView]] = (
            WeakKeyDictionary()
        )
        """Of the steps that are still read, by entry."""

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
        wholes: list[Wholes] = []
        reasons: list[str] = []
        for view in values.views:
            composed = self._composed.setdefault(view.step, {})
            if view.entry not in composed or composed[view.entry].places is not places:
                composed.update(self._compose(view, values, places))
            wholes += composed[view.entry].wholes
            reasons += composed[view.entry].reasons
        reason = reasons[0] if reasons else ""
        return _together(wholes, reason) if wholes else reason or "not digested"

    def of_all(
        self, by_call: Mapping[int, SlotValues], places: Array | None
    ) -> dict[int, Wholes | str]:
        """Return the same of every micro-batch that has the slot."""
        return {call: self.of(values, places) for call, values in by_call.items()}

    def _compose(
        self, view: SlotView, values: SlotValues, places: Array | None
    ) -> dict[int, _ComposedView]:
        """Return what ranks hold in a view, and in later ones that lie alike, by entry."""
        step, layout = view.step, self._told(view, values)
        entries, rows = step.alike_rows(view.entry)
        if not view.placements and (self._is_proving or self._layouts.declared is not None):
            entries, rows = entries[:1], rows[:1]  # a path or a number may say of each how it lies
        slots = _AlikeSlots(step, rows, places)
        meshes = self._meshes(view, values, layout, slots)
        wholes: list[list[Wholes]] = [[] for _ in entries]
        reasons: list[list[str]] = [[] for _ in entries]
        for mesh in meshes or ():
            for slot, placed in enumerate(slots.placed(mesh)):
                if isinstance(placed, str):
                    reasons[slot].append(placed)
                else:
                    wholes[slot].append(placed)
        if not view.placements:  # of one slot, but where nothing describes any
            is_told = not reasons[0] and not any(np.isnan(w.sketches).any() for w in wholes[0])
            if meshes is None or not (is_told or view.references()):
                plain = [[w] if w else [] for w in slots.alike(slots.is_known, is_described=False)]
                if plain[0] and wholes[0] and not reasons[0] and len(values.views) == 1:
                    plain[0][0].declared = _together(wholes[0], "")
                wholes, reasons = plain, [[] for _ in entries]
        return {
            entry: _ComposedView(places, wholes_of_slot, reasons_of_slot)
            for entry, wholes_of_slot, reasons_of_slot in zip(entries, wholes, reasons)
        }

    def _meshes(
        self,
        view: SlotView,
        values: SlotValues,
        layout: tuple[Mesh, Mapping[str, Placement]] | None,
        slots: _AlikeSlots,
    ) -> list[_MeshPlan] | None:
        """Return how the pieces of each mesh are composed; None of a value nothing describes."""
        placements = tuple(sorted((axis, str(p)) for axis, p in view.placements.items()))
        if not placements and layout is None:
            return None
        facts = layout and (layout[0], tuple(sorted(layout[1].items())))
        form = (view.mesh_name, view.source, placements, view.global_shape)
        key = (*form, slots.ranks.tobytes(), slots.digests["count"][0].tobytes(), facts)
        if key not in self._plans:
            pieces = self.pieces(view, values)
            assert pieces is not None
            self._plans[key] = _plans_by_mesh(pieces, slots.ranks)
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
        declared = self._layouts.placements(values.call.node.path, values.slot)
        if declared and self._layouts.mesh is not None:
            return self._layouts.mesh, declared
        is_activation = values.call.phase.facts.is_activation
        if not (self._is_proving and is_activation and len({*values.hashes.tolist()}) > 1):
            return None
        return proven_layout(Value((view,), values.call.node), self._layouts.mesh)


def _plans_by_mesh(pieces: Mapping[int, Piece], ranks: Array) -> list[_MeshPlan]:
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
        plans.append(
            _MeshPlan(at=np.array(members), ranks=ranks[members], plan=plan, pieces=row_pieces)
        )
    return plans


class _AlikeSlots:
    """What the same ranks hold in slots that lie in one way, on its way to wholes. Arrays are
    [slots, ranks], in order of rank."""

    def __init__(self, step: StepColumns, rows: Array, places: Array | None) -> None:
        """Read them; `rows`: in the values of the step."""
        ranks, order = step.by_rank(rows[0])
        rows = rows if order is None else rows[:, order]
        self.ranks = ranks.astype(np.int64)
        self.digests = step.digests(rows)
        self.is_known = are_known(step["values.digested"][rows], step["values.flags"][rows])
        self._places = None if places is None else places[self.ranks]
        self._step, self._rows = step, rows

    @cached_property
    def _has_samples(self) -> bool:
        is_batched = self._places is not None
        return is_batched and bool((self._step["values.sample_row"][self._rows] >= 0).any())

    def alike(self, is_in: Array, *, is_described: bool) -> list[Wholes | None]:
        """Return of every slot the values among those in `is_in` that are wholes by themselves, one
        for all ranks with the same bytes; None of a slot that has none."""
        slot, at = np.nonzero(is_in)
        places = np.zeros(len(at), np.int64) if self._places is None else self._places[at]
        digests = self.digests[slot, at]
        number, _ = factorize(slot, places, digests["hash"], digests["count"])
        first, order, spans, bounds = _groups(slot, number, len(is_in))
        return [
            Wholes(
                rows=digests[first[begin:end]],
                is_hashed=np.ones(end - begin, bool),
                places=places[first[begin:end]],
                members=[self.ranks[at[order[low:high]]] for low, high in spans[begin:end]],
                samples=[self._samples_at(at_slot, at[order[a:b]]) for a, b in spans[begin:end]],
                is_described=is_described,
            )
            if begin < end
            else None
            for at_slot, (begin, end) in enumerate(itertools.pairwise(bounds))
        ]

    def _samples_at(self, slot: int, at: Array) -> Array | None:
        """Return the samples of a value: of ranks that hold the same, one may have kept them."""
        if not self._has_samples:
            return None
        rows = self._rows[slot, at]
        begin, size = (
            int(self._step[f"values.{name}"][rows].max()) for name in ("sample_row", "sample_count")
        )
        return self._step["samples.sketch"][begin : begin + size] if begin >= 0 else None

    def placed(self, mesh: _MeshPlan) -> Sequence[Wholes | str]:
        """Return what the pieces of one mesh make in every slot, or why they make no whole."""
        plan, unknown = mesh.plan, "not digested on some ranks"
        if isinstance(plan, str):
            return [plan] * len(self.digests)
        is_known: Array = np.logical_and.reduce(self.is_known[:, mesh.at], axis=1)
        if len(plan.index) == 1 and not plan.is_partial:  # every rank holds the whole
            is_in = np.zeros_like(self.is_known)
            is_in[:, mesh.at] = is_known[:, None]
            return [wholes or unknown for wholes in self.alike(is_in, is_described=True)]
        composed = self._composed(mesh, plan, np.flatnonzero(is_known))
        return [next(composed) if is_whole else unknown for is_whole in is_known.tolist()]

    def _composed(self, mesh: _MeshPlan, plan: CombinationPlan, slots: Array) -> Iterator[Wholes]:
        """Yield the wholes of some slots: of each one, but where replicas differ one for those of a
        place with the same bytes."""
        index = mesh.at[plan.index]
        digests, size = self.digests[slots], index.shape[1]
        is_apart: Array = np.logical_or.reduce(replicas_differ(index, digests), axis=1)
        slot, column = np.indices((len(slots), size)).reshape(2, -1)
        facts = [slot]
        for piece in index if is_apart.any() else ():
            facts += [digests[name][:, piece] * is_apart[:, None] for name in ("hash", "count")]
            if self._places is not None:
                facts.append(self._places[piece] * is_apart[:, None])
        number, _ = factorize(*(fact.reshape(-1) for fact in facts))
        first, order, spans, bounds = _groups(slot, number, len(slots))
        combined = combined_rows(plan, digests[slot[first][:, None], index[:, column[first]].T])
        ranks = np.sort(mesh.ranks[plan.index].T, axis=1)
        of_column, of_all = [*ranks], np.sort(ranks.reshape(-1))
        held_at = np.zeros_like(index) if self._places is None else self._places[index]
        place = np.where((held_at == held_at[0]).all(0), held_at[0], EVERY_PLACE)
        place_of_all = place[:1] if (place == place[0]).all() else np.array([EVERY_PLACE])
        for at, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if not is_apart[at]:
                members, places = [of_all], place_of_all
            elif end - begin == size:
                members, places = of_column, place
            else:
                groups = (column[order[low:high]] for low, high in spans[begin:end])
                members = [np.sort(ranks[group].reshape(-1)) for group in groups]
                places = place[column[first[begin:end]]]
            samples: list[Array | None] = [None] * (end - begin)
            if self._has_samples and plan.has_offsets:
                parts = (np.isin(mesh.ranks[plan.index[0]], holders) for holders in members)
                plans = (replace(plan, index=plan.index[:, part]) for part in parts)
                samples = [self._composed_samples(int(slots[at]), mesh, part) for part in plans]
            yield Wholes(
                rows=combined[begin:end],
                is_hashed=np.zeros(end - begin, bool),
                places=places,
                members=members,
                samples=samples,
                is_described=True,
            )

    def _composed_samples(self, slot: int, mesh: _MeshPlan, plan: CombinationPlan) -> Array | None:
        """Return the samples of a whole; None where a piece has none."""
        rows, sketches = self._rows[slot], self._step["samples.sketch"]
        firsts, counts, dims = (
            self._step[f"values.{name}"][rows]
            for name in ("sample_row", "sample_count", "sample_dim")
        )
        samples: Array | None = None
        for row, piece in zip(plan.index, mesh.pieces):
            at, ranges, shape = mesh.at[row], piece.ranges, piece.global_shape or ()
            at = at[firsts[at] >= 0]
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
                samples = np.zeros((shape[dim], sketches.shape[1]))
            of_piece = np.concatenate([np.arange(a, b) for a, b in ranges[dim]])
            first, count = int(firsts[at[0]]), int(counts[at[0]])
            if count != len(of_piece):
                return None
            samples[of_piece] += sketches[first : first + count] / plan.divisor
        return samples


def _groups(
    slot: Array, number: Array, slots: int
) -> tuple[Array, Array, list[list[int]], list[int]]:
    """Return groups of equal numbers, those of each slot by their first members: these, all
    members, where those of each group lie among them, and [slots + 1] its first group."""
    order = np.argsort(number, kind="stable")
    starts = run_starts(number[order])
    by_first = np.argsort(order[starts[:-1]])
    first = order[starts[:-1]][by_first]
    spans = np.stack([starts[:-1], starts[1:]], axis=1)[by_first].tolist()
    return first, order, spans, np.searchsorted(slot[first], np.arange(slots + 1)).tolist()


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


def combined_rows(plan: CombinationPlan, pieces: Array) -> Array:
    """Return [wholes] structured digests without hashes of what pieces make, [wholes, pieces]."""
    columns = combine(plan, pieces)
    rows = np.zeros(len(pieces), pieces.dtype)
    for statistic in STATISTICS:
        unknown = 0 if statistic.is_count else np.nan
        rows[statistic.name] = columns.numbers.get(statistic.name, unknown)
    rows["sketch"] = np.nan if columns.sketches is None else columns.sketches
    return rows


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
    for call in step_view.trained_roots:
        for values in call.inputs:
            shape = whole_shape(values)
            if len(shape) > _TOKENS_DIM:
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
        parts = np.stack([wholes.rows for wholes in calls], axis=1)
        parts["sketch"] *= np.array(scales)
        samples = []
        for index in range(len(first)):
            sketches = [wholes.samples[index] for wholes in calls]
            scaled = [
                sketch * scale for sketch, scale in zip(sketches, scales) if sketch is not None
            ]
            is_whole = len(scaled) == len(calls) and len({len(wholes) for wholes in scaled}) == 1
            samples.append(np.sum(scaled, axis=0) if is_whole else None)
        reason = next((wholes.reason for wholes in calls if wholes.reason), "")
        is_hashed = np.zeros(len(first), bool)
        rows = combined_rows(plan, parts)
        return replace(first, rows=rows, is_hashed=is_hashed, samples=samples, reason=reason)


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
        return _BROKEN_OFF if self._expected[call.node.path] - came else ""

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
