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

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import sides, sides_text
from rankscope.diagnosis.stepview import SlotValues, StepView, sibling_path
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
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


def uninitialised_parameters(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every parameter at setup that is empty, or garbage beside its
    siblings.
    """
    if not step_view.is_setup:
        return
    families: dict[tuple[str, str, str], list[SlotValues]] = {}
    instances: dict[str, list[SlotValues]] = {}
    for values in step_view.values(Phase.SETUP):
        path = values.call.path
        if values.slot.startswith("param:") and _present(values).any():
            key = (sibling_path(path), values.call.node.class_name, values.slot)
            families.setdefault(key, []).append(values)
            instances.setdefault(_instance(path), []).append(values)
    for family in families.values():
        if len(family) > _FEWEST:
            yield from _judged(step_view, context, family, instances)


def _judged(
    step_view: StepView,
    context: CheckContext,
    family: list[SlotValues],
    instances: dict[str, list[SlotValues]],
) -> Iterator[Candidate]:
    sizes = [_size(values) for values in family]
    zeros = [values for values, size in zip(family, sizes) if not size]
    filled = [size for values, size in zip(family, sizes) if size and not values.is_constant]
    usual = float(np.median(filled)) if filled else 0.0
    alike = sum(1 / _ALIKE <= size / usual <= _ALIKE for size in filled) if usual else 0
    if alike < _FEWEST or 2 * alike <= len(family):
        return
    for values in family:
        context.coverage.applied(values)
        own = _sizes(values)
        far = _present(values) & (own > 0) & ((own > _FAR * usual) | (own * _FAR < usual))
        if far.any():
            yield _candidate(step_view, values, values.ranks[far], usual, Severity.FAULT)
    for values in zeros:
        is_whole = all(not _size(each) for each in instances[_instance(values.call.path)])
        is_alone = len(zeros) == 1 and values is not family[-1]
        if values is family[-1] or not (is_whole or is_alone):
            continue
        severity = Severity.FAULT if is_whole else Severity.WARNING
        yield _candidate(step_view, values, values.ranks[_present(values)], usual, severity)


def _instance(path: str) -> str:
    """Return the path up to its first number: the layer that a module is part of."""
    parts = path.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: at + 1])


def _present(values: SlotValues) -> Array:
    found: Array = values.is_known & (values.counts > 0)
    return found


def _sizes(values: SlotValues) -> Array:
    """Return the root mean square of the elements on every rank."""
    found: Array = values.column("l2") / np.sqrt(np.maximum(values.counts, 1))
    return found


def _size(values: SlotValues) -> float:
    """Return the largest of them; not 0 where a rank holds what is not finite."""
    is_finite = not any(values.column(name).any() for name in NONFINITE)
    return float("inf") if not is_finite else float(_sizes(values)[_present(values)].max())


def _candidate(
    step_view: StepView,
    values: SlotValues,
    ranks: Array,
    usual: float,
    severity: Severity,
) -> Candidate:
    what = "is zero" if not _size(values) else "is of another order of magnitude"
    return candidate_of(
        step_view,
        values,
        Kind.SCALE,
        ranks,
        f"{what} on {ranks_named(ranks.tolist())}, while the same parameter of its siblings has a "
        f"root mean square of {usual:.3g} ({sides_text(values, ranks)})",
        advice=_ADVICE,
        severity=severity,
        evidence=lambda: {"values": sides(values, ranks), "siblings_rms": usual},
        priority=1,
    )
