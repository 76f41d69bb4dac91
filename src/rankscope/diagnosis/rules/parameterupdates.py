"""What should move in an optimizer step did.

A parameter should move where its gradient is not zero, the step was not skipped, and an optimizer
holds it. It did not where its bytes are those it had before. Not told, because it is how training
may be:

* a step in which nothing moved at all, while every parameter is held: a warm-up begins with a
  learning rate of 0;
* a gradient that is small beside those that moved something, by more than a factor of 1,000;
* parameters of two bytes an element, where an update of less than half their spacing is lost,
  unless a sibling's moved with a gradient of a quarter of the size, each beside its own elements.

A gradient whose parameter no optimizer holds is a warning, and a fault where the optimizer holds
parameters that no module owns: it was made before `fully_shard` replaced them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, suspect_at
from rankscope.diagnosis.context import CheckContext, Latest
from rankscope.diagnosis.stepview import SlotValues, StepView, sibling_path
from rankscope.record.call import Phase
from rankscope.record.finding import Kind, Severity
from rankscope.record.notes import NoteKind, RanksNote
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.statistics import NONFINITE
from rankscope.record.value import ValueFlag

__all__ = ["parameters_left", "remember_parameters"]

Array = NDArray[Any]
_NARROW: Final = ("bfloat16", "float16")
_SMALL: Final = 1e-3
_SURE: Final = 4.0
"""A narrow parameter should move where its gradient is, beside its elements, this many times as
large as that of a sibling that moved."""
_LEAST: Final = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedUpdate:
    """One parameter in one optimizer step."""

    held: SlotValues
    """After the step."""
    stayed: Array
    """Ranks with a gradient whose part is what it was."""
    moved: Array
    unheld: Array
    """Ranks on which no optimizer holds it."""
    size: float
    """Root mean square of the gradient, the largest over the ranks on which it stayed."""
    moved_size: float
    """The same over those on which it moved; 0 where there are none."""
    pressure: float
    """Largest gradient by largest element, the largest over the ranks on which it stayed."""
    moved_pressure: float
    """The same, the smallest over those on which it moved; inf where there are none."""


def parameters_left(moment: StepView, scene: CheckContext) -> Iterator[Candidate]:
    """Yield a suspect for every parameter that an optimizer step left as it was."""
    updates = list(_updates(moment, scene))
    typical = _typical([u.moved_size for u in updates if len(u.moved)])
    siblings: dict[tuple[str, str], float] = {}
    for update in updates:
        kin = _kin(update.held)
        siblings[kin] = min(siblings.get(kin, math.inf), update.moved_pressure)
    is_stale = bool(_on_foreign_parameters(moment))
    warned = scene.life(moment.incarnation).warned
    for update in updates:
        scene.ledger.applied(update.held)
        if len(update.unheld):
            place = (update.held.call.path, update.held.slot)
            if not is_stale and place in warned:
                continue
            warned.add(place)
            yield _unheld(moment, scene, update, is_stale=is_stale)
        elif len(update.stayed) and _should_move(update, typical, siblings):
            yield _left(moment, scene, update)


def remember_parameters(moment: StepView, scene: CheckContext) -> None:
    """Keep the parameters of this step for the next."""
    life = scene.life(moment.incarnation)
    for held in moment.values(Phase.SETUP, Phase.PARAMS):
        if held.slot.startswith("param:") and held.is_known.any():
            key = (held.call.path, held.slot)
            known = held.is_known
            life.parameters[key] = Latest(
                held.ranks[known].copy(), held.hashes[known].copy(), held.column("sketch")[known]
            )


def _on_foreign_parameters(moment: StepView) -> list[RanksNote]:
    """Return the notes on optimizers that hold parameters of no module."""
    return [each for each in moment.notes if each.note.kind is NoteKind.FOREIGN_PARAMETERS]


def _kin(held: SlotValues) -> tuple[str, str]:
    return sibling_path(held.call.path), held.slot


def _typical(sizes: list[float]) -> float | None:
    return float(np.median(sizes)) if sizes else None


def _should_move(
    update: _JudgedUpdate, typical: float | None, siblings: Mapping[tuple[str, str], float]
) -> bool:
    if typical is None or update.size < _SMALL * typical:
        return False
    if update.held.dtype not in _NARROW:
        return True
    return update.pressure >= _SURE * siblings[_kin(update.held)]


def _updates(moment: StepView, scene: CheckContext) -> Iterator[_JudgedUpdate]:
    """Yield what became of every parameter that had a gradient."""
    life = scene.life(moment.incarnation)
    gradients = {
        (held.call.path, held.call.ordinal, held.slot[5:]): held
        for held in moment.values(Phase.GRADS)
        if held.slot.startswith("grad:")
    }
    if not gradients:
        return
    # what no optimizer holds is read when the step closes: its gradient came with an earlier event
    last = {(key[0], key[2]): gradients[key] for key in sorted(gradients)}
    latest = dict(life.parameters)
    for held in moment.values(Phase.PARAMS):
        if not held.slot.startswith("param:"):
            continue
        key = (held.call.path, held.slot)
        before = latest.get(key)
        latest[key] = Latest(held.ranks, held.hashes, held.column("sketch"))
        name = held.slot[6:]
        gradient = gradients.get((held.call.path, held.call.ordinal, name))
        if gradient is None:
            gradient = last.get((held.call.path, name))
        if before is None or gradient is None:
            continue
        update = _update(held, before, gradient)
        if update is not None:
            yield update


def _update(held: SlotValues, before: Latest, gradient: SlotValues) -> _JudgedUpdate | None:
    flags = gradient.flags
    is_skipped = (flags & int(ValueFlag.SKIPPED)) != 0
    is_pushed = gradient.is_known & ~is_skipped & (gradient.column("l2") > 0)
    is_finite = sum(gradient.column(name) for name in NONFINITE) == 0
    ranks = gradient.ranks[is_pushed & is_finite]
    places, old = held.at(ranks), _places(before.ranks, ranks)
    both = (places >= 0) & (old >= 0)
    ranks, places, old = ranks[both], places[both], old[both]
    both = held.is_known[places]
    ranks, places, old = ranks[both], places[both], old[both]
    if not len(ranks):
        return None
    is_same = held.hashes[places] == before.hashes[old]
    at = gradient.at(ranks)
    unheld = (flags[at] & int(ValueFlag.UNHELD)) != 0
    stays = is_same & ~unheld
    scale = gradient.column("l2")[at] / np.sqrt(np.maximum(gradient.counts[at], 1))
    pressure = _largest(gradient, at) / np.maximum(_largest(held, places), _LEAST)
    return _JudgedUpdate(
        held=held,
        stayed=ranks[stays],
        moved=ranks[~is_same],
        unheld=ranks[unheld & is_same],
        size=float(scale[is_same].max(initial=0.0)),
        moved_size=float(scale[~is_same].max(initial=0.0)),
        pressure=float(pressure[stays].max(initial=0.0)),
        moved_pressure=float(pressure[~is_same].min(initial=math.inf)),
    )


def _largest(held: SlotValues, places: Array) -> Array:
    """Return the largest absolute element on each rank."""
    found: Array = np.maximum(abs(held.column("min")[places]), abs(held.column("max")[places]))
    return found


def _places(known: Array, ranks: Array) -> Array:
    found = np.minimum(np.searchsorted(known, ranks), len(known) - 1)
    return np.where(known[found] == ranks, found, -1)


def _left(moment: StepView, scene: CheckContext, update: _JudgedUpdate) -> Candidate:
    return _suspect(
        moment,
        scene,
        update,
        update.stayed,
        "has a gradient and was not moved by the optimizer step",
        Severity.FAULT,
    )


def _unheld(
    moment: StepView, scene: CheckContext, update: _JudgedUpdate, *, is_stale: bool
) -> Candidate:
    if not is_stale:
        text = "has a gradient, but no optimizer holds it"
        return _suspect(moment, scene, update, update.unheld, text, Severity.WARNING)
    text = (
        "has a gradient and did not move: no optimizer holds it, but one holds parameters that "
        "no module owns any more"
    )
    return _suspect(moment, scene, update, update.unheld, text, Severity.FAULT)


def _suspect(
    moment: StepView,
    scene: CheckContext,
    update: _JudgedUpdate,
    ranks: Array,
    text: str,
    severity: Severity,
) -> Candidate:
    held = update.held

    def evidence() -> dict[str, Any]:
        return {
            "gradient_rms": update.size,
            "moved": ranks_text(update.moved.tolist()),
            "notes": [str(each) for each in _on_foreign_parameters(moment)],
        }

    return suspect_at(
        moment,
        held.call,
        Kind.PARAMETER,
        held.slot,
        ranks,
        ranks,
        scene.times(held, ranks),
        f"{text} ({ranks_named(ranks.tolist())})",
        severity=severity,
        evidence=evidence,
        priority=-1,
    )
