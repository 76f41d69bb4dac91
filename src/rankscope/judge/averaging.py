"""Ranks that train apart and average their parameters now and then (local SGD) are no fault.

Their gradients and parameters differ as if a reduction had been forgotten. What tells is the
average: an all-reduce of the very parameters that the step before left different. Sums are seen
before they are divided, or after, of each parameter or of all of them in one flat tensor; so inputs
are told by their number of elements and their norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.judge.issues import issues_of
from rankscope.judge.observed import Held, Moment
from rankscope.judge.scene import Life, Scene
from rankscope.judge.suspects import Suspect
from rankscope.record.call import Phase
from rankscope.record.finding import Kind

__all__ = ["note_averaging", "without_training_apart"]

Array = NDArray[Any]
_CLOSE: Final = 1e-5
"""Relative, of norms: those of the parts of a flat tensor are added."""


def note_averaging(moment: Moment, scene: Scene) -> None:
    """Keep whether ranks trained apart in this step, and whether they averaged their parameters."""
    life = scene.life(moment.incarnation)
    if life.unlike and _is_average(moment, life):
        life.averages.append(moment.step)
    gradients = [h for h in moment.values(Phase.GRADS) if _is_shared(h)]
    if gradients and all(held.agree(held.ranks) is False for held in gradients):
        life.apart.add(moment.step)
    latest = [h for h in moment.values(Phase.PARAMS) if _is_shared(h)]
    if latest:
        unlike = (h for h in latest if h.agree(h.ranks) is False)
        life.unlike = [(h.ranks.copy(), h.counts.copy(), h.column("l2").copy()) for h in unlike]


def _is_shared(held: Held) -> bool:
    """True for a plain parameter or gradient that several ranks hold."""
    if not held.slot.startswith(("param:", "grad:")) or held.source != "unknown":
        return False
    return len(held.ranks) > 1 and not held.is_constant


def _is_average(moment: Moment, life: Life) -> bool:
    """True where most of what was left different goes into all-reduces."""
    parts = [(ranks, counts, norms**2) for ranks, counts, norms in life.unlike]
    every = int(sum(int(counts[0]) for _, counts, _ in parts))
    if all(np.array_equal(ranks, parts[0][0]) for ranks, _, _ in parts):
        ranks, counts = parts[0][0], np.sum([counts for _, counts, _ in parts], axis=0)
        parts.append((ranks, counts, np.sum([squares for _, _, squares in parts], axis=0)))
    summed = 0
    for issue in issues_of(moment):
        held = issue.call.held.get("input.0") if issue.op == "all_reduce" else None
        if held is None or held.agree(held.ranks) is not False:
            continue
        if any(_is_of(held, *part) for part in parts):
            summed += int(held.counts[0])
    return 2 * summed >= every


def _is_of(held: Held, ranks: Array, counts: Array, squares: Array) -> bool:
    """True where the input of a collective is, on each of its ranks, a parameter of this size and
    norm, whole or divided by the number of ranks."""
    places = np.minimum(np.searchsorted(ranks, held.ranks), len(ranks) - 1)
    if (ranks[places] != held.ranks).any() or (counts[places] != held.counts).any():
        return False
    norms = np.sqrt(squares[places])
    return any(
        bool((abs(held.column("l2") * scale - norms) <= _CLOSE * norms).all())
        for scale in (1, len(held.ranks))
    )


def without_training_apart(suspects: Iterable[Suspect], scene: Scene) -> Iterator[Suspect]:
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


def _is_apart(suspect: Suspect, life: Life) -> bool:
    if suspect.step not in life.apart:
        return False
    return suspect.kind is Kind.GRADIENT or (
        suspect.kind is Kind.REPLICA and suspect.phase in (Phase.GRADS, Phase.PARAMS)
    )
