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
from rankscope.diagnosis.evidence.replicas import Layouts
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView
from rankscope.diagnosis.rules.endings import ORDERLY
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
from rankscope.tree.assembly.combine import CombinationPlan, apply_plan, plan_rows
from rankscope.tree.slotview import SlotView
from rankscope.tree.summary import endings
from rankscope.tree.tensors.kept import held_pieces
from rankscope.tree.tensors.proofs import proven_layout
from rankscope.tree.views import Node, Trace, Value

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
        held = _HeldValues(values, places)
        made: list[Wholes] = []
        reasons = []
        for view in values.views:
            meshes = self._meshes(view, values)
            if meshes is None:
                at = values.at(np.array(view.ranks, np.int64))
                made += held.alike(at[values.is_known[at]], is_described=False)
            for mesh in meshes or ():
                placed = held.placed(mesh)
                if isinstance(placed, str):
                    reasons.append(placed)
                else:
                    made += placed
        reason = reasons[0] if reasons else ""
        return _together(made, reason) if made else reason or "not digested"

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
    plans = []
    for mesh, members in by_mesh.items():
        held = [(rank, pieces[rank]) for rank in ranks[members].tolist()]
        plan: CombinationPlan | str = next((p.refusal for _, p in held if p.refusal), "")
        if not plan:
            is_known = mesh is not None and held[0][1].global_shape is not None
            plan = plan_rows(held) if is_known else "layout unknown"
        rows = [] if isinstance(plan, str) else plan.index[:, 0].tolist()
        own = tuple(held[row][1] for row in rows)
        plans.append(_MeshPlan(at=at[members], ranks=ranks[members], plan=plan, pieces=own))
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
        """Return values of which each is a whole: those that are bitwise the same are one."""
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
        combined = apply_plan(plan, self._digests[mesh.at])
        if combined.note is not None and combined.note.kind is NoteKind.REPLICAS_DIFFER:
            columns = range(plan.index.shape[1])
            plans = [replace(plan, index=plan.index[:, at : at + 1]) for at in columns]
            every = [(own, apply_plan(own, self._digests[mesh.at])) for own in plans]
        elif combined.is_known:
            every = [(plan, combined)]
        else:
            return str(combined.note)
        return [self._composed(mesh, *own) for own in every]

    def _composed(self, mesh: _MeshPlan, plan: CombinationPlan, combined: Combined) -> Wholes:
        members = np.sort(mesh.ranks[np.unique(plan.index)])
        places = np.zeros(1, np.int64) if self._places is None else np.unique(self._places[members])
        return Wholes(
            rows=combined_row(combined, self._digests.dtype)[None],
            is_hashed=np.zeros(1, bool),
            places=places if len(places) == 1 else np.array([EVERY_PLACE]),
            members=[members],
            samples=[self._composed_samples(mesh, plan) if plan.has_offsets else None],
            is_described=True,
        )

    def _composed_samples(self, mesh: _MeshPlan, plan: CombinationPlan) -> Array | None:
        """Return the samples of a whole; None where a piece has none."""
        if self._places is None:
            return None
        dims = self._values.column("sample_dim")
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
            dim = int(dims[at[0]])
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


def _together(made: Sequence[Wholes], reason: str) -> Wholes:
    """Return the wholes of several meshes, or of values that none describes, as those of a slot."""
    if len(made) == 1:
        made[0].reason = reason
        return made[0]
    return Wholes(
        rows=np.concatenate([each.rows for each in made]),
        is_hashed=np.concatenate([each.is_hashed for each in made]),
        places=np.concatenate([each.places for each in made]),
        members=[ranks for each in made for ranks in each.members],
        samples=[own for each in made for own in each.samples],
        is_described=all(each.is_described for each in made),
        reason=reason,
    )


def combined_row(found: Combined, dtype: np.dtype[Any]) -> Array:
    """Return what was combined as a structured digest without a hash."""
    row = np.zeros((), dtype)
    for each in STATISTICS:
        number = found.number(each.name)
        row[each.name] = number if number is not None else 0 if each.is_count else np.nan
    row["sketch"] = np.nan if found.sketch is None else found.sketch
    return row


# ---- rollouts ------------------------------------------------------------------------------------

# Forwards of the same tokens may have been made in other ways: a training step beside a forward
# without gradients, one call of a whole sequence beside calls of a part and then of single tokens.
# A token's part of a sketch is the sketch of that token alone, times the factor of its position
# over that of position 0: factors of dims are independent. So calls of one token each add up to the
# sketch of the sequence; of calls with several tokens behind the first one they do not.
_TOKENS_DIM: Final = 1


def token_counts(step_view: StepView) -> list[int]:
    """Return the tokens of a sample in every root call, as the root's inputs tell; [] where they
    have no dim for them."""
    found: dict[int, int] = {}
    for call in step_view.roots:
        for values in call.inputs:
            shape = whole_shape(values)
            if call.path == "" and len(shape) > _TOKENS_DIM:
                found.setdefault(call.micro_batch or 0, shape[_TOKENS_DIM])
    return [found[micro_batch] for micro_batch in sorted(found)]


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
        rest = {shape[:_TOKENS_DIM] + shape[_TOKENS_DIM + 1 :] for shape in shapes}
        counts = [shape[_TOKENS_DIM : _TOKENS_DIM + 1] for shape in shapes]
        if len(rest) != 1 or counts != [(count,) for count in self._tokens]:
            return {0: "no value of each token in every call of the rollout"}
        made: list[Wholes] = []
        for values in calls:
            own = self.of(values, places)
            if isinstance(own, str):
                return {0: own}
            made.append(own)
        return {0: self._joined(made)}

    def _joined(self, calls: list[Wholes]) -> Wholes | str:
        first = calls[0]
        for other in calls[1:]:
            same_places = np.array_equal(other.places, first.places)
            if not same_places or not all(map(np.array_equal, other.members, first.members)):
                return "ranks hold other values in some calls of the rollout"
        if any(count > 1 for count in self._tokens[1:]):
            return "several tokens at once behind the first call of the rollout"
        scales = [_scale(sum(self._tokens[:index])) for index in range(len(calls))]
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
            parts = np.concatenate([each.rows[[index]] for each in calls])
            parts["sketch"] *= np.array(scales)
            rows.append(combined_row(apply_plan(plan, parts), first.rows.dtype)[None])
            kept = [each.samples[index] for each in calls]
            known = [own * scale for own, scale in zip(kept, scales) if own is not None]
            is_whole = len(known) == len(calls) and len({len(each) for each in known}) == 1
            samples.append(np.sum(known, axis=0) if is_whole else None)
        reason = next((each.reason for each in calls if each.reason), "")
        is_hashed = np.zeros(len(first), bool)
        rows_of_all = np.concatenate(rows)
        return replace(first, rows=rows_of_all, is_hashed=is_hashed, samples=samples, reason=reason)


def _scale(start: int) -> Array:
    """Return [K] the factors of a position over those of position 0."""
    at, first = (factors(_TOKENS_DIM, ((n, n + 1),))[:, 0].astype(np.float64) for n in (start, 0))
    return at / first if start else np.ones(len(at))


# ---- ranks that a trace lacks --------------------------------------------------------------------


_BROKEN_OFF: Final = "not all of its ranks came here before the run broke off"


class LostRanks:
    """What is unknown of one incarnation of a run."""

    def __init__(self, trace: Trace, incarnation: int) -> None:
        run, completeness = trace.run, trace.completeness
        self._trace = trace
        self.world = int(run["world_size"])
        self.untraced = frozenset(range(self.world)) - {each["rank"] for each in run["ranks"]}
        self.is_partial = bool(self.untraced)
        """True where values are skipped because of them."""
        self.broken = sorted(
            each["rank"]
            for each in completeness["ranks"]
            if each["incarnation"] == incarnation and each["end"] not in ORDERLY
        )
        self._expected: defaultdict[str, set[int]] = defaultdict(set)
        """By path: the ranks that call the module."""
        self._cut_from: dict[Mode, int] = {}
        """The first step that a broken rank may have left."""
        if self.broken:
            self._read(incarnation)

    def _read(self, incarnation: int) -> None:
        last: defaultdict[Mode, dict[int, int]] = defaultdict(lambda: dict.fromkeys(self.broken, 0))
        for step in (*self._trace.setup, *self._trace.steps):
            for top in step.fresh() if step.incarnation == incarnation else ():
                self._take(top)
                if not step.is_setup:
                    own = last[step.mode]
                    own |= {r: max(own[r], step.step) for r in top.ranks if r in own}
        self._cut_from = {mode: min(steps.values()) for mode, steps in last.items()}

    def _take(self, top: Node) -> None:
        """Note the ranks of a call and of those inside it: a rank that did not come back from one
        may not have come to what is inside."""
        waiting: list[tuple[Node, frozenset[int]]] = [(top, frozenset())]
        while waiting:
            node, stuck = waiting.pop()
            self._expected[node.path].update(node.ranks, stuck)
            left = [r for each in node.outcomes if not each.has_returned for r in each.ranks]
            waiting.extend((child, stuck.union(left)) for child in node.children)

    def is_cut(self, mode: Mode, step: int) -> bool:
        """True for a step that some rank may have left before its end."""
        return mode in self._cut_from and step >= self._cut_from[mode]

    def of(self, values: SlotValues) -> str:
        """Return why nothing can be said of a value; "" where nothing of it is missing."""
        if self.is_partial:
            return f"{self._untraced} of the run {self._was} not traced"
        call = values.call
        if call.phase is Phase.SETUP or not self.is_cut(call.node.head.mode, call.node.head.step):
            return ""
        came = set(values.ranks[values.is_known].tolist())
        return _BROKEN_OFF if self._expected[call.path] - came else ""

    @property
    def _untraced(self) -> str:
        return ranks_named(sorted(self.untraced))

    @property
    def _was(self) -> str:
        return "was" if len(self.untraced) == 1 else "were"

    def lacks(self, name: str) -> str:
        """Return what of this trace (`name`: REF or TEST) is unknown, and what to do; "" for
        nothing."""
        if self.is_partial:
            return (
                f"{self._untraced} of {self.world} {self._was} not traced in {name}: trace all "
                "ranks, or the same ranks of the same topology in both runs"
            )
        if not self.broken:
            return ""
        ended = "; ".join(endings(self._trace.completeness))
        return f"{name} broke off ({ended}): no difference in what was compared before"

    def notes(self, name: str) -> list[str]:
        """Return how ranks that raised an exception say they ended."""
        found = []
        for each in self._trace.completeness["ranks"]:
            raised = each.get("raised")
            if each["rank"] in self.broken and raised:
                text = str(raised.get("error", "")).partition("\n")[0]
                where = f" ({raised['where']})" if raised.get("where") else ""
                found.append(f"{name}: rank {each['rank']} raised {text}{where}")
        return found[:4]
