"""When things happened on each rank: positions for the order of causes; and the count of its
collectives that each rank keeps.

Inputs stand at the begin of their call, outputs at its end, and just after it what hooks made of
them, and what came out of a collective: its end is when the others reach this rank.
A gradient has the time at which its tensor hook fired. Setup, gradients and parameters are one
event each: their values have no order among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.stepview import CallView, SlotValues, is_input
from rankscope.record.phases import Phase

__all__ = ["RankClock"]

Array = NDArray[Any]


class RankClock:
    """Begin and end of every call on every rank, and which collective of its group it was."""

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._rank = columns["calls.rank"]
        self._start = columns["calls.start_ns"]
        self._duration = columns["calls.duration_ns"]
        self._issued = columns.get("calls.issued")

    def span(self, call: CallView, ranks: Array) -> tuple[Array, Array]:
        """Return begin and end of a call on these ranks, in ns; where an end was not recorded, its
        begin."""
        found = self._rows(call, ranks)
        if found is None:
            return np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
        start = self._start[found]
        return start, start + np.maximum(self._duration[found], 0)

    def issued(self, call: CallView, ranks: Array) -> Array:
        """Return the column `calls.issued` of a collective on these ranks; 0 in a trace without."""
        found = self._rows(call, ranks) if self._issued is not None else None
        if found is None or self._issued is None:
            return np.zeros(len(ranks), np.uint64)
        return np.asarray(self._issued[found])

    def _rows(self, call: CallView, ranks: Array) -> Array | None:
        rows = call.node.call_rows
        own = self._rank[rows.start : rows.stop]
        if not len(own):
            return None
        return rows.start + np.minimum(np.searchsorted(own, ranks), len(own) - 1)

    def of_call(self, call: CallView, ranks: Array, *, is_end: bool = False) -> Array:
        """Return when a call began (or ended) on these ranks."""
        begin, end = self.span(call.top if call.phase.facts.is_event else call, ranks)
        return end if is_end and not call.phase.facts.is_event else begin

    def of_value(self, values: SlotValues, ranks: Array) -> Array:
        """Return when a value was there on these ranks."""
        call = values.call
        if call.phase is Phase.BACKWARD:
            places = np.maximum(values.at(ranks), 0)
            return values.column("time_ns")[places]
        if is_input(values.slot, call.phase):
            return self.of_call(call, ranks)
        late = int(values.slot.startswith("returned") or call.phase is Phase.COLLECTIVE)
        return self.of_call(call, ranks, is_end=True) + late
