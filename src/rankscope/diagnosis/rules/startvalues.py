"""What parameters hold when training begins: shards that are equal, and memory that nobody filled.

**Equal shards.** Ranks along a `Shard` axis that hold bitwise the same at setup drew the same
random numbers, or loaded the same part of a file. Constants prove nothing, nor do patterns repeated
on purpose: decay tables of channels, experts that begin as copies. So it is a fault where numbers
look random (mean zero within the error of a sample), or most parameters cut along the axis are
equal. Stacked experts (three dims or more) are a warning, unless one of fewer dims shows the same.

**Uninitialised parameters**: `to_empty` without `reset_parameters`. Fresh memory is zero, recycled
memory is anything. Siblings (`layers.*`) say what a parameter should look like: a millionfold other
magnitude is garbage; one of zeros beside random siblings is a fault where its whole layer is zero,
norms and all, else a warning, and nothing for the last sibling or where several are zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import sides, sides_text
from rankscope.diagnosis.evidence.replicas import sorted_lines
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, grouped, layer_of, sibling_path
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text

# ---- shards that are equal -----------------------------------------------------------------------

_FEWEST_ELEMENTS: Final = 8
"""Of a shard: fewer may be equal by chance."""
_ERRORS: Final = 5.0
"""A sample's mean lies within so many standard errors of the true one."""
_STACKED: Final = 3
"""Dims of a parameter that holds several experts."""
_EQUAL_ADVICE: Final = (
    "Each rank filled its own shard from the same random numbers, or loaded the same part of the "
    "file: draw the whole tensor alike on all ranks and cut it (distribute_tensor), seed each "
    "shard by its place on the mesh, or look at the offsets with which the checkpoint is read."
)


def equal_shards(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every sharded parameter whose shards are bitwise equal at setup."""
    if not step_view.is_setup:
        return
    cut: dict[tuple[str, str], list[tuple[SlotValues, list[Array]]]] = {}
    for values in step_view.parameters(Phase.SETUP):
        if values.source != "dtensor" or values.is_constant:
            continue
        for axis, lines in _shard_lines(values).items():
            judged = [(line, values.agree(line)) for line in lines]
            if any(answer is not None for _, answer in judged):
                step_view.context.coverage.applied(values)
                equal = [line for line, answer in judged if answer]
                cut.setdefault((values.views[0].mesh_name, axis), []).append((values, equal))
    seen: set[int] = set()
    for (_, axis), along in cut.items():
        equal_ones = [(values, lines) for values, lines in along if lines]
        is_usual = len(equal_ones) > 1 and 2 * len(equal_ones) >= len(along)
        is_plain = any(len(values.views[0].pieces[0].shape) < _STACKED for values, _ in equal_ones)
        for values, lines in equal_ones:
            if id(values) in seen or not (is_usual or _is_drawn(values)):
                continue
            seen.add(id(values))
            is_stacked = len(values.views[0].pieces[0].shape) >= _STACKED and not is_plain
            yield _equal_candidate(step_view, values, axis, lines, is_stacked=is_stacked)


def _shard_lines(values: SlotValues) -> dict[str, list[Array]]:
    view = values.views[0]
    return {
        axis: [line for mesh in view.meshes for line in sorted_lines(mesh, [axis]) if len(line) > 1]
        for axis, placement in view.placements.items()
        if placement.dim is not None
    }


def _is_drawn(values: SlotValues) -> bool:
    """True where the elements look like random numbers around zero."""
    count, mean, std = (values.column(name)[0] for name in ("count", "mean", "std"))
    return bool(count >= _FEWEST_ELEMENTS and abs(mean) * np.sqrt(count) <= _ERRORS * std)


def _equal_candidate(
    step_view: JudgedStep, values: SlotValues, axis: str, lines: list[Array], *, is_stacked: bool
) -> Candidate:
    ranks = np.unique(np.concatenate(lines))
    return step_view.candidate(
        values,
        Kind.DUPLICATE,
        ranks,
        f"{ranks_named(ranks)} hold different parts of it (along axis {axis!r}), and yet "
        f"the same values ({sides_text(values, ranks)})",
        advice=_EQUAL_ADVICE,
        severity=Severity.WARNING if is_stacked else Severity.FAULT,
        evidence=lambda: {
            "axis": axis,
            "same_on": [ranks_text(line) for line in lines[:8]],
            "values": sides(values, ranks),
        },
    )


# ---- parameters that nobody initialised ----------------------------------------------------------

_FEWEST: Final = 2
"""Siblings that have to agree on what a parameter looks like."""
_FAR: Final = 1e6
"""Parameters that were initialised do not lie as far apart as that, nor do trained ones."""
_ALIKE: Final = 1e2
_ADVICE: Final = (
    "Nothing seems to have initialised this module: call reset_parameters() behind to_empty(), or "
    "load its weights. Zeros on purpose are no fault."
)


def uninitialised_parameters(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every parameter at setup that is zero, or garbage beside siblings."""
    if not step_view.is_setup:
        return
    filled = [values for values in step_view.parameters(Phase.SETUP) if values.has_elements.any()]
    instances = grouped((layer_of(h.call.path) or h.call.path, h) for h in filled)
    families = grouped(
        ((sibling_path(h.call.path), h.call.node.class_name, h.slot), h) for h in filled
    )
    for family in families.values():
        if len(family) > _FEWEST:
            yield from _judged_family(step_view, family, instances)


def _judged_family(
    step_view: JudgedStep, family: list[SlotValues], instances: dict[str, list[SlotValues]]
) -> Iterator[Candidate]:
    sizes = [_size(values) for values in family]
    zeros = [values for values, size in zip(family, sizes) if not size]
    filled = [size for values, size in zip(family, sizes) if size and not values.is_constant]
    usual = float(np.median(filled)) if filled else 0.0
    alike = sum(1 / _ALIKE <= size / usual <= _ALIKE for size in filled) if usual else 0
    if alike < _FEWEST or 2 * alike <= len(family):
        return
    for values in family:
        step_view.context.coverage.applied(values)
        own = _sizes(values)
        far = values.has_elements & (own > 0) & ((own > _FAR * usual) | (own * _FAR < usual))
        if far.any():
            yield _empty_candidate(step_view, values, values.ranks[far], usual, Severity.FAULT)
    for values in zeros:
        path = values.call.path
        is_whole = all(not _size(each) for each in instances[layer_of(path) or path])
        is_alone = len(zeros) == 1 and values is not family[-1]
        if values is family[-1] or not (is_whole or is_alone):
            continue
        severity = Severity.FAULT if is_whole else Severity.WARNING
        ranks = values.ranks[values.has_elements]
        yield _empty_candidate(step_view, values, ranks, usual, severity)


def _sizes(values: SlotValues) -> Array:
    found: Array = values.column("l2") / np.sqrt(np.maximum(values.counts, 1))
    return found


def _size(values: SlotValues) -> float:
    """Return the largest of `_sizes`; inf where a rank holds what is not finite."""
    if not values.is_finite(values.ranks):
        return float("inf")
    return float(_sizes(values)[values.has_elements].max())


def _empty_candidate(
    step_view: JudgedStep, values: SlotValues, ranks: Array, usual: float, severity: Severity
) -> Candidate:
    what = "is zero" if not _size(values) else "is of another order of magnitude"
    return step_view.candidate(
        values,
        Kind.SCALE,
        ranks,
        f"{what} on {ranks_named(ranks)}, while the same parameter of its siblings has a "
        f"root mean square of {usual:.3g} ({sides_text(values, ranks)})",
        advice=_ADVICE,
        severity=severity,
        evidence=lambda: {"values": sides(values, ranks), "siblings_rms": usual},
        priority=1,
    )
