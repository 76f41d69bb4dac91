"""Numbers of whole tensors from those of the pieces that ranks hold, many slots of a step at a
time: most slots of a model lie in one of a few ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.layout.placement import Mesh
from rankscope.layout.plan import Piece
from rankscope.record.notes import Note
from rankscope.record.ranks import ranks_named
from rankscope.record.statistics import Combined
from rankscope.tree.assembly.combine import CombinationPlan, apply_to_all, plan_rows
from rankscope.tree.heldlayouts import layout_of
from rankscope.tree.step import StepColumns

_MOST_ROWS: Final = 1 << 14
"""Values combined at a time."""


def combined(step: StepColumns, entry: int, meshes: Sequence[Mesh]) -> tuple[Combined, ...]:
    """Return the global statistics of a slot, one per mesh that gives another result; of the slots
    behind it that lie as it does too, for whoever asks next. `entry`: which of the entries of the
    step it is; `meshes`: of the kind that its layout names."""
    if entry not in step.combined:
        alike = step.alike_entries
        same = np.flatnonzero(alike[entry:] == alike[entry]) + entry
        begin, end = step.entry_start[entry : entry + 2].tolist()
        same = same[: max(1, _MOST_ROWS // (end - begin))]
        rows = step.entry_start[same][:, None] + np.arange(end - begin)
        for own, found in zip(same.tolist(), _all_combined(step, rows, meshes)):
            step.combined[own] = tuple(found)
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
        own = np.flatnonzero(np.isin(ranks, mesh.ranks))
        if not len(own):
            continue
        whose = tuple(ranks[own].tolist())
        blank = own[~is_digested[own]]
        plan = _plan(step.texts, mesh, whose, tuple(tensors[own].tolist()))
        if isinstance(plan, str):
            found = [Combined(ranks=whose, note=Note.words(plan))] * len(rows)
        elif len(blank):
            held = ranks_named(ranks[blank].tolist())
            found = [Combined(ranks=whose, note=Note.words(f"not digested on {held}"))] * len(rows)
        else:
            found = apply_to_all(plan, numbers[:, own])
        for known, each in zip(results, found):
            _add(known, each)
    return results


def _plan(
    texts: Any, mesh: Mesh, ranks: tuple[int, ...], tensors: tuple[int, ...]
) -> CombinationPlan | str:
    """Return how rows make up the whole; made once for a layout and its ranks."""
    key = mesh, ranks, tensors
    found: CombinationPlan | str | None = texts.made.get(key)
    if found is None:
        facts = [texts.tensor(number) for number in tensors]
        pieces = (
            Piece(
                shape=each.shape,
                layout=layout_of(each, mesh),
                global_shape=each.global_shape,
                ranges=each.ranges,
            )
            for each in facts
        )
        found = texts.made[key] = plan_rows([*zip(ranks, pieces)])
    return found


def _add(results: list[Combined], found: Combined) -> None:
    """Fold a result into an equal one of another mesh of the family."""
    for i, known in enumerate(results):
        # repr, because NaN is not equal to itself
        if repr(replace(known, ranks=())) == repr(replace(found, ranks=())):
            results[i] = replace(known, ranks=tuple(sorted({*known.ranks, *found.ranks})))
            return
    results.append(found)
