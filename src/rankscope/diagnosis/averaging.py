"""Ranks that train apart and average their parameters now and then (local SGD) are no fault.

Their gradients and parameters differ as if a reduction had been forgotten. What tells is the
average: an all-reduce of the very parameters that the step before left different. It may be of each
parameter or of all of them in one flat tensor, whole or divided by the number of ranks: inputs are
told by their number of elements and their norm. Or it is of how far each rank went from a common
point (DiLoCo): then inputs differ between ranks by what the parameters differ, as sketches tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate
from rankscope.diagnosis.context import CheckContext, IncarnationState, Left
from rankscope.diagnosis.issuedcollectives import issues_of
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.call import Phase
from rankscope.record.finding import Kind

__all__ = ["note_averaging", "without_training_apart"]

Array = NDArray[Any]
_CLOSE: Final = 1e-5
"""Relative, of norms: those of the parts of a flat tensor are added."""
_CLOSE_APART: Final = 1e-3
"""Relative, of differences between ranks: they are rounded as the parameters are."""


def note_averaging(moment: StepView, scene: CheckContext) -> None:
    """Keep whether ranks trained apart in this step, and whether they averaged their parameters."""
    life = scene.life(moment.incarnation)
    events: dict[int, bool] = {}
    for held in filter(_is_shared, moment.values(Phase.GRADS)):
        key = id(held.call.top)
        events[key] = events.get(key, True) and held.agree(held.ranks) is False
    if any(events.values()):
        life.apart.add(moment.step)
    latest = [h for h in moment.values(Phase.PARAMS) if _is_shared(h)]
    before = life.unlike
    if latest:
        unlike = (h for h in latest if h.agree(h.ranks) is False)
        life.unlike = [
            Left(h.ranks.copy(), h.counts.copy(), h.column("l2") ** 2, h.column("sketch").copy())
            for h in unlike
        ]
    if any(left and _is_average(moment, left) for left in (before, life.unlike)):
        life.averages.append(moment.step)


def _is_shared(held: SlotValues) -> bool:
    """True for a plain parameter or gradient that several ranks hold."""
    if not held.slot.startswith(("param:", "grad:")) or held.source != "unknown":
        return False
    return len(held.ranks) > 1 and not held.is_constant


def _is_average(moment: StepView, left: list[Left]) -> bool:
    """True where most of what was left different goes into all-reduces."""
    parts = list(left)
    every = sum(int(part.counts[0]) for part in parts)
    if all(np.array_equal(part.ranks, parts[0].ranks) for part in parts):
        counts = np.sum([part.counts for part in parts], axis=0)
        parts.append(Left(parts[0].ranks, counts, np.sum([p.squares for p in parts], axis=0), None))
    summed = 0
    for issue in issues_of(moment):
        held = issue.call.held.get("input.0") if issue.op == "all_reduce" else None
        if held is None or held.agree(held.ranks) is not False:
            continue
        if any(_is_of(held, part) for part in parts):
            summed += int(held.counts[0])
    return 2 * summed >= every


def _is_of(held: SlotValues, part: Left) -> bool:
    """True where the input of a collective is, on each of its ranks, a parameter of this size and
    norm, or lies as far from those of other ranks as the parameter does."""
    places = np.minimum(np.searchsorted(part.ranks, held.ranks), len(part.ranks) - 1)
    if (part.ranks[places] != held.ranks).any() or (part.counts[places] != held.counts).any():
        return False
    norms = np.sqrt(part.squares[places])
    scales = (1, len(held.ranks))
    given = held.column("l2")
    if any(bool((abs(given * scale - norms) <= _CLOSE * norms).all()) for scale in scales):
        return True
    if part.sketches is None:
        return False
    apart = _between(part.sketches[places])
    given = _between(held.column("sketch"))
    allowed = _CLOSE_APART * abs(apart).max()
    ways = [sign * scale * given for sign in (1, -1) for scale in scales]
    return bool(allowed) and any(bool((abs(way - apart) <= allowed).all()) for way in ways)


def _between(sketches: Array) -> Array:
    return np.asarray(sketches[1:] - sketches[0], np.float64)


def without_training_apart(
    suspects: Iterable[Candidate], scene: CheckContext
) -> Iterator[Candidate]:
    """Yield the suspects but for what differs because ranks train apart."""
    for suspect in suspects:
        life = scene.life(suspect.incarnation)
        if not life.averages or not _is_apart(suspect, life):
            yield suspect
            continue
        scene.ledger.note(
            f"ranks train apart and average their parameters (seen in step {life.averages[0]}): "
            "gradients and parameters of steps without a reduction were not compared"
        )


def _is_apart(suspect: Candidate, life: IncarnationState) -> bool:
    if suspect.step not in life.apart:
        return False
    return suspect.kind is Kind.GRADIENT or (
        suspect.kind is Kind.REPLICA and suspect.phase in (Phase.GRADS, Phase.PARAMS)
    )
