"""One slot of one node: a cursor over the values of a step on which its ranks agree what it is.

Numbers of whole tensors are combined for many slots at a time: most slots of a model lie in one of
a few ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.layout.placement import (
    Layout,
    LayoutSource,
    Mesh,
    PieceKind,
    Placement,
    Ranges,
    global_ranges,
    parse_placement,
)
from rankscope.layout.plan import Piece
from rankscope.record.notes import Note
from rankscope.record.ranks import MAX_RANKS, ranks_named
from rankscope.record.statistics import Combined
from rankscope.record.value import UNFOLDED_FLAGS, Digest, Samples, TensorFacts, ValueFlag
from rankscope.tree.assembly.combine import CombinationPlan, apply_to_all, plan_rows
from rankscope.tree.step import StepColumns
from rankscope.tree.tracejson import damaged_is_trace_error

_SOURCES: Final = frozenset(source.value for source in LayoutSource)


@lru_cache(maxsize=4096)
def placements_of(facts: TensorFacts) -> dict[str, Placement]:
    """Return {axis: placement}; {} where the layout is unknown."""
    if facts.source not in _SOURCES:
        return {}
    return {axis: parse_placement(text) for axis, text in facts.placements}


def source_of(facts: TensorFacts) -> LayoutSource:
    """Return the source of a layout, unknown where a newer rankscope has one of its own."""
    return LayoutSource(facts.source) if facts.source in _SOURCES else LayoutSource.UNKNOWN


def layout_of(facts: TensorFacts, mesh: Mesh | None) -> Layout:
    """Return the layout of a value that lies over a mesh, None for one that is not known."""
    if mesh is None:
        return Layout(source=source_of(facts))
    placements = placements_of(facts)
    placed = tuple(placements[axis] for axis in mesh.axes)
    return Layout(source=source_of(facts), mesh=mesh, placements=placed)


def _combined(step: StepColumns, entry: int, meshes: Sequence[Mesh]) -> tuple[Combined, ...]:
    """Return the global statistics of a slot, one per mesh that gives another result; `meshes`: of
    the kind that its layout names. Later slots that lie in the same way are combined with it."""
    if entry not in step.combined:
        entries, rows = step.alike_rows(entry)
        for number, results in zip(entries, _all_combined(step, rows, meshes)):
            step.combined[number] = tuple(results)
    return step.combined[entry]


def _all_combined(
    step: StepColumns, rows: NDArray[np.int64], meshes: Sequence[Mesh]
) -> list[list[Combined]]:
    """Return the results of some slots, [slots, ranks], that lie in one way."""
    first = rows[0]
    ranks, tensors = step["values.rank"][first], step["values.tensor"][first]
    is_digested = step["values.digested"][first]
    results: list[list[Combined]] = [[] for _ in rows]
    if not is_digested.any():
        return results
    numbers = step.digests(rows)
    for mesh in meshes:
        rows_in = np.flatnonzero(np.isin(ranks, mesh.ranks))
        if not len(rows_in):
            continue
        whose = tuple(ranks[rows_in].tolist())
        blank = rows_in[~is_digested[rows_in]]
        plan = _plan(step.texts, mesh, whose, tuple(tensors[rows_in].tolist()))
        if isinstance(plan, str):
            wholes = [Combined(ranks=whose, note=Note.words(plan))] * len(rows)
        elif len(blank):
            blanks = ranks_named(ranks[blank].tolist())
            wholes = [Combined(ranks=whose, note=Note.words(f"not digested on {blanks}"))] * len(
                rows
            )
        else:
            wholes = apply_to_all(plan, numbers[:, rows_in])
        for slot_results, combined in zip(results, wholes):
            _add(slot_results, combined)
    return results


def _plan(
    texts: Any, mesh: Mesh, ranks: tuple[int, ...], tensors: tuple[int, ...]
) -> CombinationPlan | str:
    """Return how rows make up the whole; made once for a layout and its ranks."""
    key = mesh, ranks, tensors
    plan: CombinationPlan | str | None = texts.made.get(key)
    if plan is None:
        facts = [texts.tensor(number) for number in tensors]
        pieces = (
            Piece(
                shape=piece_facts.shape,
                layout=layout_of(piece_facts, mesh),
                global_shape=piece_facts.global_shape,
                ranges=piece_facts.ranges,
            )
            for piece_facts in facts
        )
        plan = texts.made[key] = plan_rows([*zip(ranks, pieces)])
    return plan


def _add(results: list[Combined], result: Combined) -> None:
    """Fold a result into an equal one of another mesh of the family."""
    for i, earlier in enumerate(results):
        # repr, because NaN is not equal to itself
        if repr(replace(earlier, ranks=())) == repr(replace(result, ranks=())):
            results[i] = replace(earlier, ranks=tuple(sorted({*earlier.ranks, *result.ranks})))
            return
    results.append(result)


_HIDDEN: Final = UNFOLDED_FLAGS | int(ValueFlag.PYTHON)
"""They say how a value was obtained; what was not kept stands in the entry, by rank."""


@lru_cache(maxsize=1024)
def flag_words(flags: int) -> tuple[str, ...]:
    """Return the words of a value's flags, without those that only say how it was obtained."""
    bits = flags & ~_HIDDEN
    return tuple(flag.name.lower() for flag in ValueFlag if int(flag) & bits and flag.name)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What views need beside their own step."""

    meshes: Mapping[str, tuple[Mesh, ...]]
    file: Path
    """What their own data was read from."""
    world_size: int = MAX_RANKS
    """No rank is as high."""


@damaged_is_trace_error
@dataclass(frozen=True, slots=True)
class Fold:
    """Ranks that hold the same value, or the same piece of one."""

    _step: StepColumns = field(repr=False)
    _rows: Any = field(repr=False)
    _where: Whereabouts = field(repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who they are."""
        return self._step.ranks("values", self._rows)

    @property
    def _first(self) -> int:
        return int(self._rows.start if isinstance(self._rows, slice) else self._rows[0])

    @property
    def facts(self) -> TensorFacts:
        """What each of them holds."""
        return self._step.texts.tensor(int(self._step["values.tensor"][self._first]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""
        return self.facts.shape

    @property
    def digest(self) -> Digest | None:
        """The numbers of the lowest rank; None where it was not digested."""
        return self._step.digest(self._first)

    @property
    def flags(self) -> tuple[str, ...]:
        """Words of the `ValueFlag`s of the lowest rank."""
        return flag_words(int(self._step["values.flags"][self._first]))

    @property
    def note(self) -> str | None:
        """Bounded repr of what is no tensor, or why a tensor was not digested."""
        return self.facts.note

    @property
    def requires_grad(self) -> bool:
        """As of the tensor."""
        return self.facts.requires_grad


@damaged_is_trace_error
@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot of one node, as the ranks that agree on it hold it."""

    step: StepColumns = field(repr=False)
    entry: int
    _where: Whereabouts = field(repr=False)

    @property
    def rows(self) -> slice:
        """Its rows in the values of its step, one per rank."""
        return slice(*self.step.lists.first_value[self.entry : self.entry + 2])

    @property
    def slot(self) -> str:
        """Name: `input.0`, `output`, `param:weight` ..."""
        return self.step.texts.text(self.step.lists.slot[self.entry])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a value here."""
        return self.step.ranks("values", self.rows)

    @property
    def facts(self) -> TensorFacts:
        """What the lowest rank holds; dtype, device, global shape and layout are those of all."""
        return self.step.texts.tensor(self.step.lists.tensor[self.entry])

    @property
    def dtype(self) -> str:
        """torch's name without the prefix, or "python"."""
        return self.facts.dtype

    @property
    def device(self) -> str:
        """Where the value lay: "cpu", "cuda" ..."""
        return self.facts.device

    @property
    def global_shape(self) -> tuple[int, ...] | None:
        """Shape of the whole tensor, None where the layout is unknown."""
        return self.facts.global_shape

    @property
    def disagreement(self) -> tuple[str, ...]:
        """What the ranks of this slot's entries differ in; () where there is one entry."""
        step, slots = self.step, self.step["values.slot"]
        if step.has_one_entry[self.entry]:
            return ()
        node = int(step["values.node"][self.rows.start])
        first, last = step.node_entries[[node, node + 1]].tolist()
        starts = step.entry_start[first:last]
        entry_rows = starts[slots[starts] == slots[self.rows.start]]
        tensors = step["values.tensor"][entry_rows].tolist()
        shared = [step.texts.tensor(number).shared for number in tensors]
        return tuple(name for name in shared[0] if len({facts[name] for facts in shared}) > 1)

    @property
    def placements(self) -> dict[str, Placement]:
        """{axis: placement}; {} where the layout is unknown."""
        return placements_of(self.facts)

    @property
    def source(self) -> LayoutSource:
        """Where the layout comes from."""
        return source_of(self.facts)

    def layout(self, rank: int | None = None) -> Layout:
        """Return the layout, with the mesh `rank` (default: the lowest) is in."""
        return layout_of(self.facts, self._mesh(self.ranks[0] if rank is None else rank))

    @property
    def mesh_name(self) -> str:
        """The kind of mesh that the layout names, such as `dp=2,tp=2`; "" where it is unknown."""
        return self.facts.mesh if source_of(self.facts) is not LayoutSource.UNKNOWN else ""

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """All meshes of the kind that the layout names, over whatever ranks."""
        return self._where.meshes.get(self.mesh_name, ())

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The distinct values."""
        runs = itertools.pairwise(self._fold_starts.tolist())
        return tuple(Fold(self.step, slice(begin, end), self._where) for begin, end in runs)

    @property
    def pieces(self) -> tuple[Fold, ...]:
        """The distinct pieces: ranks with the same shape, flags and note, whatever the numbers."""
        step, rows = self.step, self.rows
        flags = (step["values.flags"][rows] & ~np.uint32(UNFOLDED_FLAGS)).astype(np.int64)
        key = step.piece_numbers[rows] << 32 | flags
        if (key == key[0]).all():
            return (Fold(step, rows, self._where),)
        parts = (np.flatnonzero(key == number) + rows.start for number in np.unique(key))
        return tuple(Fold(step, part, self._where) for part in parts)

    @property
    def distinct(self) -> int:
        """How many different values the ranks hold."""
        return len(self._fold_starts) - 1

    @property
    def combined(self) -> tuple[Combined, ...]:
        """Global statistics, one per mesh that gives another result; () without shards."""
        return _combined(self.step, self.entry, self.meshes) if self._is_spread() else ()

    def per_rank(self) -> dict[int, Digest | None]:
        """Return each rank's numbers, None where a value was not digested."""
        first = self.rows.start
        return {rank: self.step.digest(row) for row, rank in enumerate(self.ranks, first)}

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Return each rank's local shape."""
        return {rank: fold.shape for fold in self.pieces for rank in fold.ranks}

    def references(self) -> dict[int, tuple[int, int]]:
        """Return {rank: (incarnation, reference)} of the ranks whose full tensor was kept."""
        life = self.step.head.incarnation
        numbers = self.step["values.reference"][self.rows]
        at = np.flatnonzero(numbers)
        ranks = self.step["values.rank"][self.rows][at].tolist()
        return {rank: (life, number) for rank, number in zip(ranks, numbers[at].tolist())}

    @property
    def not_kept(self) -> tuple[int, ...]:
        """Ranks whose full tensor was asked for and could not be kept."""
        flags = self.step["values.flags"][self.rows] & int(ValueFlag.NOT_KEPT)
        return tuple(self.step["values.rank"][self.rows][flags != 0].tolist())

    def ranges(self, rank: int, piece: Fold | None = None) -> tuple[Ranges, ...] | None:
        """Return the global indices a rank holds, None where the layout is unknown; `piece`: the
        one of `pieces` that the rank holds, where a reader goes through them."""
        for fold in self.pieces if piece is None else (piece,):
            facts = fold.facts
            is_its_own = piece is not None or rank in fold.ranks
            if is_its_own and facts.shape == self.global_shape:  # others may have nothing of it
                return tuple(((0, size),) for size in facts.shape)
            if is_its_own and facts.ranges is not None:
                return facts.ranges
        layout, shape = self.layout(rank), self.global_shape
        at = layout.mesh.coordinate(rank) if layout.mesh else None
        if layout.mesh is None or shape is None or at is None:
            return None
        return global_ranges(shape, layout.mesh.shape, at, layout.placements)

    def samples(self) -> dict[int, Samples]:
        """Return per-sample sketches by rank, for the ranks that have them."""
        step, samples = self.step, {}
        names = ("rank", "sample_dim", "sample_count", "sample_row")
        columns = (step[f"values.{name}"][self.rows].tolist() for name in names)
        for rank, dim, count, first in zip(*columns):
            if first >= 0:
                rows = step["samples.sketch"][first : first + count].tolist()
                samples[rank] = Samples(dim=dim, rows=tuple(map(tuple, rows)))
        return samples

    @property
    def _fold_starts(self) -> Any:
        first, last = self.step.entry_folds[self.entry : self.entry + 2].tolist()
        return self.step.fold_start[first : last + 1]

    def _mesh(self, rank: int) -> Mesh | None:
        return next((mesh for mesh in self.meshes if rank in mesh.ranks), None)

    def _is_spread(self) -> bool:
        """True where the layout is known, and ranks hold pieces or different values."""
        if not self._where.meshes or not self.meshes or self.global_shape is None:
            return False
        is_whole = all(p.pieces is PieceKind.COPIES for p in self.placements.values())
        return self.distinct > 1 or not is_whole


def by_slot(views: Iterable[SlotView]) -> dict[str, list[SlotView]]:
    """Return entries by the name of their slot: those of ranks that differ in it together."""
    slots: dict[str, list[SlotView]] = {}
    for view in views:
        slots.setdefault(view.slot, []).append(view)
    return slots


def shapes_of(views: Iterable[SlotView]) -> dict[int, tuple[int, ...]]:
    """Return each rank's local shape in entries of one slot."""
    return {rank: shape for view in views for rank, shape in view.shapes().items()}


def type_text(slot: SlotView, rank: int | None = None) -> str:
    """Return dtype and shape: `float32[2, 32, *]`; the shape is that of the whole tensor, or what
    is common to the ranks' own. With `rank`, and where the layout is unknown, that rank's own."""
    if slot.global_shape is not None:
        return f"{slot.dtype}{[*slot.global_shape]}"
    shapes = {piece.shape for piece in slot.pieces if rank is None or rank in piece.ranks}
    if len({len(shape) for shape in shapes}) != 1:
        return f"{slot.dtype}[...]"
    sizes = [set(dim) for dim in zip(*shapes)]
    common = (str(*size) if len(size) == 1 else "*" for size in sizes)
    return f"{slot.dtype}[{', '.join(common)}]"


def is_bound_to_one_tensor(slot: SlotView, entries: Iterable[SlotView]) -> bool:
    """True where one mesh spans an entry and one of `entries`, entries of the same slot on ranks
    that differ from it: its layout says that they hold one tensor. Stages of a pipeline share a
    path and hold different things."""
    mesh = slot.layout().mesh
    bound = set(mesh.ranks) if mesh else set()
    return any(entry.placements and bound & set(entry.ranks) for entry in entries)
