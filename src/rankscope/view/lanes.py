"""Time spans of one rank as slices that nest: what a timeline can draw on one track."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Edge", "Span", "edges"]

T = TypeVar("T")


class Span(NamedTuple, Generic[T]):
    """One call."""

    start: int
    end: float
    """math.inf where its end was not recorded."""
    what: T


class Edge(NamedTuple, Generic[T]):
    """Where a slice begins or ends."""

    lane: int
    time: int
    begins: T | None
    """What begins; None where the innermost open slice of the lane ends."""


def edges(spans: Iterable[Span[T]]) -> Iterator[Edge[T]]:
    """Yield the edges of spans, in order of time on every lane.

    A span lies inside those that last longer, and where two last equally long, inside the one that
    was given first: give parents first. One that begins inside another and outlasts it goes to the
    next lane. A span without end ends with the slice it lies in; outside of any it stays open.
    """
    open_ends: list[list[float]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        lane = 0
        for lane, ends in enumerate(open_ends):
            yield from _closed(lane, ends, span.start)
            if not ends or span.end <= ends[-1] or span.end == math.inf:
                break
        else:
            lane = len(open_ends)
            open_ends.append([])
        ends = open_ends[lane]
        ends.append(min(span.end, ends[-1]) if ends else span.end)
        yield Edge(lane, span.start, span.what)
    for lane, ends in enumerate(open_ends):
        yield from _closed(lane, ends, math.inf)


def _closed(lane: int, ends: list[float], now: float) -> Iterator[Edge[T]]:
    """End what has ended by now; what has no end stays open."""
    while ends and ends[-1] <= now and ends[-1] != math.inf:
        yield Edge(lane, int(ends.pop()), None)
