"""Which values a page holds: all where they fit, else those around the findings and every k-th
step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.tree.summary import counted

__all__ = ["ValueChoice", "chosen_values"]

Array = NDArray[Any]
_STRIDES = (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True, slots=True)
class ValueChoice:
    """What of a trace has its values on the page."""

    rows_of: dict[int, frozenset[int] | None]
    """By step: which modules, None for all; a step that is not here has none."""
    left_out: str
    """What is not there and how to get it, in words; "" where all is."""


def chosen_values(
    entries: Sequence[Array],
    found: Collection[int],
    near: Collection[int],
    steps_of_findings: Collection[int],
    limit: float,
) -> ValueChoice:
    """Return what fits.

    Args:
        entries: of every step [modules or more] values by row.
        found: rows of findings.
        near: the same, with those around and beside them.
        steps_of_findings: steps that should be there.
        limit: how many entries fit.
    """
    every = range(len(entries))
    whole = [int(each.sum()) for each in entries]
    strides = [stride for stride in _STRIDES if stride < 2 * len(entries)]
    if sum(whole) <= limit:
        return ValueChoice(dict.fromkeys(every), "")
    rows_of: dict[int, frozenset[int] | None] = {}
    own: list[int] = []
    left = limit
    for own, stride in itertools.product((sorted(near), sorted(found)), (1, *strides, len(every))):
        costs = [int(each[[row for row in own if row < len(each)]].sum()) for each in entries]
        around = [s for s in every if costs[s] and (s % stride == 0 or s in steps_of_findings)]
        if sum(costs[step] for step in around) <= limit / 2:
            rows_of = {step: frozenset(own) for step in around}
            left = limit - sum(costs[step] for step in around)
            break
    for stride in strides:
        full = [step for step in every if step % stride == 0]
        if sum(whole[step] for step in full) <= left:
            rows_of.update(dict.fromkeys(full))
            return ValueChoice(rows_of, _words(rows_of, len(entries), len(own), stride))
    first = np.flatnonzero(np.cumsum(entries[0]) <= left)
    rows_of[0] = frozenset(first.tolist()) | (rows_of.get(0) or frozenset())
    return ValueChoice(rows_of, _words(rows_of, len(entries), len(own), 0))


def _words(rows_of: dict[int, frozenset[int] | None], steps: int, near: int, stride: int) -> str:
    parts = []
    if stride:
        parts.append(f"of all modules in one step of {stride}")
    else:
        parts.append("of the first modules of the first step")
    around = sum(1 for rows in rows_of.values() if rows is not None)
    if near and around:
        parts.append(
            f"of {counted(near, 'module')} around the findings in {counted(around, 'step')} more"
        )
    return (
        f"The map shows everything. The values behind its cells would not fit: those "
        f"{' and '.join(parts)} are here, of {counted(steps, 'step')} (setup is one). For others "
        "write a narrower page: rankscope report TRACE --path 'layers.3*' --step 10-12"
    )
