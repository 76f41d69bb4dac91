"""What the calls of each node say together, for all nodes at once.

Most nodes are one call that every rank made alike, and there may be a hundred thousand of them:
what ends up in every node's head is found by column here, one row per node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.nodes import Merged
from rankscope.record.call import CallStatus

__all__ = ["CallFacts", "NodeFacts"]

_NEVER = np.iinfo(np.int64).max


class NodeFacts(NamedTuple):
    """One node's row, as plain numbers."""

    node: int
    parent: int
    identity: int
    first_call: int
    last_call: int
    """One past it; rows of the merged calls."""
    path: int
    module: int
    """Of the lowest rank."""
    is_one_module: bool
    """False where ranks call it by different class or raw path."""
    phase: int
    micro_batch: int
    ordinal: int
    forward_ordinal: int
    graph_task: int
    collective: int
    """Of the lowest rank, -1 for none."""
    has_returned: bool
    """True where nothing but that is to be said of any rank's call."""
    start_us: float
    min_us: float | None
    max_us: float | None
    slowest: int | None
    first_entry: int
    last_entry: int
    """One past it."""


class CallFacts:
    """The columns, and the rows of a range of nodes."""

    def __init__(self, merged: Merged, rank_of_stream: NDArray[np.int64], began_ns: int) -> None:
        """Make the columns; `began_ns`: wall clock at which the run began."""
        calls, first = merged.calls, merged.call_start[:-1]
        heads = calls.chosen(first)
        shortest, longest, slowest = _durations(merged, rank_of_stream)
        returned = (calls["status"] == CallStatus.RETURNED) & _same(merged, calls["text"])
        self._is_ended = slowest >= 0
        self._columns: tuple[NDArray[Any], ...] = (
            np.arange(len(first)), merged.parent, merged.identity, first, merged.call_start[1:],
            heads["path"], heads["module"], _of_all(merged, _same(merged, calls["module"])),
            heads["phase"], heads["micro_batch"], heads["ordinal"], merged.forward_ordinal,
            heads["pass"], heads["collective"], _of_all(merged, returned),
            _microseconds(heads["start"] - began_ns), _microseconds(shortest),
            _microseconds(longest), slowest, merged.node_entries[:-1],
            merged.node_entries[1:],
        )  # fmt: skip

    def rows(self, first: int, last: int) -> Iterator[NodeFacts]:
        """Yield the rows of nodes `first` to `last` (excluded)."""
        found = map(NodeFacts._make, zip(*(c[first:last].tolist() for c in self._columns)))
        for row, is_ended in zip(found, self._is_ended[first:last].tolist()):
            yield row if is_ended else row._replace(min_us=None, max_us=None, slowest=None)


def _microseconds(ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Nanoseconds in microseconds, to one place; in integers, so that halves round the same way."""
    rounded: NDArray[np.float64] = (ns + 50) // 100 / 10
    return rounded


def _node_of_call(merged: Merged) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(merged.parent)), np.diff(merged.call_start))


def _same(merged: Merged, column: NDArray[Any]) -> NDArray[np.bool_]:
    """Which calls have in a column what the first call of their node has."""
    same: NDArray[np.bool_] = column == column[merged.call_start[:-1]][_node_of_call(merged)]
    return same


def _of_all(merged: Merged, holds: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of which nodes it holds for every call."""
    if not len(holds):
        return holds
    every: NDArray[np.bool_] = np.logical_and.reduceat(holds, merged.call_start[:-1])
    return every


def _durations(
    merged: Merged, rank_of_stream: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return per node the shortest and longest call in ns, 0 where none has ended, and whose is the
    longest, -1 where none has ended."""
    calls, first = merged.calls, merged.call_start[:-1]
    if not len(calls):
        return first, first, first
    is_done = calls["status"] != CallStatus.UNFINISHED
    taken = calls["end"] - calls["start"]
    shortest = np.minimum.reduceat(np.where(is_done, taken, _NEVER), first)
    longest = np.maximum.reduceat(np.where(is_done, taken, -_NEVER), first)
    row = np.arange(len(calls))
    is_longest = is_done & (taken == longest[_node_of_call(merged)])
    at = np.minimum.reduceat(np.where(is_longest, row, len(calls)), first)
    has_any = at < len(calls)
    whose = rank_of_stream[calls["stream"][np.where(has_any, at, 0)]]
    return (
        np.where(has_any, shortest, 0),
        np.where(has_any, longest, 0),
        np.where(has_any, whose, -1),
    )
