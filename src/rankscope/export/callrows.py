"""The calls of a node, rank by rank, from the columns of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rankscope.errors import TraceError
from rankscope.record.call import CallStatus
from rankscope.tree.digests import Columns
from rankscope.tree.views import Node

__all__ = ["CallRows", "RankCall"]

_FIRST_LOOK, _LARGEST_LOOK = 64, 1 << 20


class RankCall(NamedTuple):
    """One rank's call."""

    rank: int
    start: int
    """Wall clock, ns."""
    end: int | None
    """None where it was not recorded."""
    status: str


class CallRows:
    """Finds the rows of nodes that are asked for in the order of the tree: each of its groups has
    its rows in that order, and mostly one group's stand behind those of the group before (steps
    that were written while their job ran: in the order in which they ended, then setup)."""

    def __init__(self, columns: Columns) -> None:
        self._node, self._rank = columns["calls.node"], columns["calls.rank"]
        self._start, self._duration = columns["calls.start_ns"], columns["calls.duration_ns"]
        self._status = columns["calls.status"]
        self._next = 0

    def of(self, node: Node) -> Iterator[RankCall]:
        """Yield the calls of a node, by rank.

        Raises:
            TraceError: as `rows`.
        """
        for row in self.rows(node):
            start, duration = int(self._start[row]), int(self._duration[row])
            yield RankCall(
                int(self._rank[row]),
                start,
                None if duration < 0 else start + duration,
                CallStatus.word_of(int(self._status[row])),
            )

    def rows(self, node: Node) -> range:
        """Return the rows of a node in the columns of calls.

        Raises:
            TraceError: the columns have none.
        """
        wanted = np.uint64(int(node.id, 16))
        first = self._find(wanted)
        if first is None:
            raise TraceError(
                f"{node.path or '(root)'}: the columns have no call of node {node.id}: "
                "the trace is damaged"
            )
        last, look = first + 1, len(node.ranks)  # one row a rank, unless the trace is damaged
        while last < len(self._node) and self._node[last] == wanted:
            others = np.flatnonzero(self._node[last : last + look] != wanted)
            last += int(others[0]) if len(others) else len(self._node[last : last + look])
        self._next = last
        return range(first, last)

    def _find(self, wanted: np.uint64) -> int | None:
        """Return the first row of a node, looked for from the next one on; mostly it is that."""
        if self._next < len(self._node) and self._node[self._next] == wanted:
            return self._next
        row = self._look(wanted, self._next, len(self._node))
        return self._look(wanted, 0, self._next) if row is None else row

    def _look(self, wanted: np.uint64, begin: int, end: int) -> int | None:
        length = _FIRST_LOOK
        while begin < end:
            found = np.flatnonzero(self._node[begin : min(begin + length, end)] == wanted)
            if len(found):
                return begin + int(found[0])
            begin, length = begin + length, min(2 * length, _LARGEST_LOOK)
        return None
