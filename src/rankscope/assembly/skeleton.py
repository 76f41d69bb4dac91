"""A rank's forward calls as they nest, straight from its records, and the records without some of
them: for who knows beforehand that of a deep model he will look at little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.assembly.rankstreams import RankStream
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.spool.recordformat import NO_SEQUENCE

__all__ = ["BareCall", "forward_calls", "without_calls"]


@dataclass(slots=True, eq=False)
class BareCall:
    """A call of which nothing is known but what was called, and what inside it."""

    sequence: int
    path: str
    """Canonical path of the module."""
    children: list[BareCall] = field(default_factory=list)

    def walk(self) -> Iterator[BareCall]:
        """Yield the call and every one inside it."""
        yield self
        for child in self.children:
            yield from child.walk()


def forward_calls(stream: RankStream) -> list[BareCall]:
    """Return the outermost forward calls, in the order in which they began."""
    status = stream.exits["status"] == int(CallStatus.NOT_ENTERED)
    never = frozenset(stream.exits["sequence"][status].tolist())
    known: dict[int, BareCall] = {}
    tops: list[BareCall] = []
    columns = (stream.enters[name].tolist() for name in ("sequence", "parent", "module", "phase"))
    for sequence, parent, module, phase in zip(*columns):
        if phase != Phase.FORWARD or sequence in never:
            continue
        around = known.get(parent) if parent != NO_SEQUENCE else None
        known[sequence] = call = BareCall(sequence, str(stream.definitions[module]["path"]))
        (tops if around is None else around.children).append(call)
    return tops


def without_calls(stream: RankStream, calls: Iterable[BareCall]) -> RankStream:
    """Return the records without some calls, what is inside them, and their values."""
    sequences = {inner.sequence for call in calls for inner in call.walk()}
    if not sequences:
        return stream
    out = np.fromiter(sequences, np.uint64, len(sequences))
    left = ~np.isin(stream.values["sequence"], out)
    return replace(
        stream,
        enters=stream.enters[~np.isin(stream.enters["sequence"], out)],
        exits=stream.exits[~np.isin(stream.exits["sequence"], out)],
        values=stream.values.chosen(left),
    )
