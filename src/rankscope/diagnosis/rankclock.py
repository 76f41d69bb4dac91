"""When things happened on each rank: positions for the order of causes; and the count of its
collectives that each rank keeps.

Inputs stand at the begin of their call, outputs at its end, and just after it what hooks made of
them, and what came out of a collective: its end is when the others reach this rank.
A gradient has the time at which its tensor hook fired. Setup, gradients and parameters are one
event each: their values have no order among themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.stepview import CallView, SlotValues, is_input
from rankscope.record.phases import Phase

__all__ = ["issued_counts", "span_of_call", "times_of_call", "times_of_value"]

Array = NDArray[Any]


def span_of_call(call: CallView, ranks: Array) -> tuple[Array, Array]:
    """Return begin and end of a call on these ranks, in ns; where an end was not recorded, its
    begin."""
    start = _on("start_ns", call, ranks)
    return start, start + np.maximum(_on("duration_ns", call, ranks), 0)


def issued_counts(call: CallView, ranks: Array) -> Array:
    """Return the column `calls.issued` of a collective on these ranks."""
    return _on("issued", call, ranks)


def times_of_call(call: CallView, ranks: Array, *, is_end: bool = False) -> Array:
    """Return when a call began (or ended) on these ranks."""
    begin, end = span_of_call(call.top if call.phase.facts.is_event else call, ranks)
    return end if is_end and not call.phase.facts.is_event else begin


def times_of_value(values: SlotValues, ranks: Array) -> Array:
    """Return when a value was there on these ranks."""
    call = values.call
    if call.phase is Phase.BACKWARD:
        places = np.maximum(values.at(ranks), 0)
        return values.column("time_ns")[places]
    if is_input(values.slot, call.phase):
        return times_of_call(call, ranks)
    late = int(values.slot.startswith("returned") or call.phase is Phase.COLLECTIVE)
    return times_of_call(call, ranks, is_end=True) + late


def _on(name: str, call: CallView, ranks: Array) -> Array:
    """Return a column of calls on these ranks."""
    step, rows = call.node.step, call.node.call_rows
    own = step["calls.rank"][rows]
    places = np.minimum(np.searchsorted(own, ranks), len(own) - 1)
    column: Array = step[f"calls.{name}"][rows][places]
    return column
