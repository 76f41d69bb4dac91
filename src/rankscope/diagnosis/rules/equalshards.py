"""Shards of one parameter that hold the same on several ranks: each rank filled or loaded the same.

The shards of a DTensor are different parts of one tensor. Where the ranks along a `Shard` axis
hold bitwise the same at setup, every rank drew the same random numbers for its own part, or loaded
the same part of a file. Constants prove nothing, and nor do parameters that repeat a pattern on
purpose: decay tables that every channel shares, experts that begin as copies of one. So equal
shards are a fault where the numbers look as if drawn at random (their mean is zero within the error
of a sample), or where most parameters that are cut along the axis are so. Experts stacked in one
parameter of three dims or more are a warning, unless a parameter of fewer dims shows the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import sides, sides_text
from rankscope.diagnosis.layouts import sorted_lines
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named, ranks_text

__all__ = ["equal_shards"]

Array = NDArray[Any]
_FEWEST_ELEMENTS: Final = 8
"""Of a shard: fewer may be equal by chance."""
_ERRORS: Final = 5.0
"""A sample's mean lies within so many standard errors of the true one."""
_STACKED: Final = 3
"""Dims of a parameter that holds several experts."""
_ADVICE: Final = (
    "Each rank filled its own shard from the same random numbers, or loaded the same part of the "
    "file: draw the whole tensor alike on all ranks and cut it (distribute_tensor), seed each "
    "shard by its place on the mesh, or look at the offsets with which the checkpoint is read."
)


def equal_shards(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every sharded parameter whose shards are bitwise equal at setup."""
    if not step_view.is_setup:
        return
    cut: dict[tuple[str, str], list[tuple[SlotValues, list[Array]]]] = {}
    for values in step_view.values(Phase.SETUP):
        if not values.slot.startswith("param:") or values.source != "dtensor" or values.is_constant:
            continue
        for axis, lines in _shard_lines(values).items():
            judged = [(line, values.agree(line)) for line in lines]
            if any(answer is not None for _, answer in judged):
                context.coverage.applied(values)
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
            yield _candidate(step_view, values, axis, lines, is_stacked=is_stacked)


def _shard_lines(values: SlotValues) -> dict[str, list[Array]]:
    """Return {axis: its lines of ranks} of the mesh axes that cut a parameter."""
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


def _candidate(
    step_view: StepView,
    values: SlotValues,
    axis: str,
    lines: list[Array],
    *,
    is_stacked: bool,
) -> Candidate:
    ranks = np.unique(np.concatenate(lines))
    return candidate_of(
        step_view,
        values,
        Kind.DUPLICATE,
        ranks,
        f"{ranks_named(ranks.tolist())} hold different parts of it (along axis {axis!r}), and yet "
        f"the same values ({sides_text(values, ranks)})",
        advice=_ADVICE,
        severity=Severity.WARNING if is_stacked else Severity.FAULT,
        evidence=lambda: {
            "axis": axis,
            "same_on": [ranks_text(line.tolist()) for line in lines[:8]],
            "values": sides(values, ranks),
        },
    )
