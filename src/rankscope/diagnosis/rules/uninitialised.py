"""Parameters that nobody initialised: `to_empty` without `reset_parameters`.

Fresh memory is zero, recycled memory holds whatever was there. What siblings hold (`layers.*`) says
what a parameter should look like: one of another order of magnitude by a factor of a million is
garbage, and one that is zero through and through while theirs are random is a fault where its whole
layer is zero, norms and all. Else it may be zero on purpose: a warning, and not even that for the
last sibling or where several are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, suspect_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import sides, sides_text
from rankscope.diagnosis.stepview import SlotValues, StepView, sibling_path
from rankscope.record.call import Phase
from rankscope.record.finding import Kind, Severity
from rankscope.record.ranklists import ranks_named
from rankscope.record.statistics import NONFINITE

__all__ = ["uninitialised_parameters"]

Array = NDArray[Any]
_FEWEST: Final = 2
"""Siblings that have to agree on what a parameter looks like."""
_FAR: Final = 1e6
"""Parameters that were initialised do not lie as far apart as that, nor do trained ones."""
_ALIKE: Final = 1e2
_ADVICE: Final = (
    "Nothing seems to have initialised this module: call reset_parameters() behind to_empty(), or "
    "load its weights. Zeros on purpose are no fault."
)


def uninitialised_parameters(moment: StepView, scene: CheckContext) -> Iterator[Candidate]:
    """Yield a suspect for every parameter at setup that is empty or garbage beside its siblings."""
    if not moment.is_setup:
        return
    families: dict[tuple[str, str, str], list[SlotValues]] = {}
    instances: dict[str, list[SlotValues]] = {}
    for held in moment.values(Phase.SETUP):
        path = held.call.path
        if held.slot.startswith("param:") and _present(held).any():
            key = (sibling_path(path), held.call.node.class_name, held.slot)
            families.setdefault(key, []).append(held)
            instances.setdefault(_instance(path), []).append(held)
    for family in families.values():
        if len(family) > _FEWEST:
            yield from _judged(moment, scene, family, instances)


def _judged(
    moment: StepView,
    scene: CheckContext,
    family: list[SlotValues],
    instances: dict[str, list[SlotValues]],
) -> Iterator[Candidate]:
    sizes = [_size(held) for held in family]
    zeros = [held for held, size in zip(family, sizes) if not size]
    filled = [size for held, size in zip(family, sizes) if size and not held.is_constant]
    usual = float(np.median(filled)) if filled else 0.0
    alike = sum(1 / _ALIKE <= size / usual <= _ALIKE for size in filled) if usual else 0
    if alike < _FEWEST or 2 * alike <= len(family):
        return
    for held in family:
        scene.ledger.applied(held)
        own = _sizes(held)
        far = _present(held) & (own > 0) & ((own > _FAR * usual) | (own * _FAR < usual))
        if far.any():
            yield _suspect(moment, scene, held, held.ranks[far], usual, Severity.FAULT)
    for held in zeros:
        is_whole = all(not _size(each) for each in instances[_instance(held.call.path)])
        is_alone = len(zeros) == 1 and held is not family[-1]
        if held is family[-1] or not (is_whole or is_alone):
            continue
        severity = Severity.FAULT if is_whole else Severity.WARNING
        yield _suspect(moment, scene, held, held.ranks[_present(held)], usual, severity)


def _instance(path: str) -> str:
    """Return the path up to its first number: the layer that a module is part of."""
    parts = path.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: at + 1])


def _present(held: SlotValues) -> Array:
    found: Array = held.is_known & (held.counts > 0)
    return found


def _sizes(held: SlotValues) -> Array:
    """Return the root mean square of the elements on every rank."""
    found: Array = held.column("l2") / np.sqrt(np.maximum(held.counts, 1))
    return found


def _size(held: SlotValues) -> float:
    """Return the largest of them; not 0 where a rank holds what is not finite."""
    is_finite = not any(held.column(name).any() for name in NONFINITE)
    return float("inf") if not is_finite else float(_sizes(held)[_present(held)].max())


def _suspect(
    moment: StepView,
    scene: CheckContext,
    held: SlotValues,
    ranks: Array,
    usual: float,
    severity: Severity,
) -> Candidate:
    what = "is zero" if not _size(held) else "is of another order of magnitude"
    return suspect_at(
        moment,
        held.call,
        Kind.SCALE,
        held.slot,
        ranks,
        ranks,
        scene.times(held, ranks),
        f"{what} on {ranks_named(ranks.tolist())}, while the same parameter of its siblings has a "
        f"root mean square of {usual:.3g} ({sides_text(held, ranks)})",
        advice=_ADVICE,
        severity=severity,
        evidence=lambda: {"values": sides(held, ranks), "siblings_rms": usual},
        priority=1,
    )
