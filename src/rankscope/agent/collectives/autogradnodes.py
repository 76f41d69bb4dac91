"""Which module call made which nodes of the autograd graph: what backward issues at a node belongs
to the call that made it.

torch numbers the nodes of a graph in the order in which a thread makes them. So the nodes that one
module call made are a span of numbers, and calls nest as spans do.
"""

from __future__ import annotations

import bisect
from _thread import get_ident
from typing import NamedTuple

from rankscope.agent.hooks.callstack import OpenCall, Scope
from rankscope.agent.hooks.modules import ModuleInfo
from rankscope.capture.torch_internals.autograd import next_node

__all__ = ["NodeMap", "NodeSpan"]


class NodeSpan(NamedTuple):
    """The nodes that one call made: `first` to `last`, excluded."""

    first: int
    last: int
    info: ModuleInfo
    scope: Scope
    sequence: int | None
    """Of the call, or of the one around it where it left no record."""


class NodeMap:
    """The spans of one step's calls; each thread numbers nodes for itself."""

    def __init__(self) -> None:
        self._spans: dict[int, list[NodeSpan]] = {}
        """By thread, in the order in which calls ended: children before their parent."""
        self._latest: dict[ModuleInfo, NodeSpan] = {}

    def begin(self, frame: OpenCall) -> None:
        """Note where a call begins."""
        frame.first_node = next_node()

    def end(self, frame: OpenCall) -> None:
        """Note where it ends; called again, where what follows it (its own hooks) ends."""
        last = next_node()
        span = NodeSpan(frame.first_node, last, frame.info, frame.scope, frame.sequence)
        frame.first_node = last
        if span.last > span.first:
            self._spans.setdefault(get_ident(), []).append(span)
        self._latest[frame.info] = span

    def find(self, number: int) -> NodeSpan | None:
        """Return the innermost call that made a node; calls of this thread are asked first."""
        own = self._spans.get(get_ident())
        found = _innermost(own, number) if own else None
        if found is not None:
            return found
        for spans in list(self._spans.values()):
            found = _innermost(spans, number)
            if found is not None:
                return found
        return None

    def latest(self, info: ModuleInfo) -> NodeSpan | None:
        """Return the call of a module that ended last."""
        return self._latest.get(info)

    def clear(self) -> None:
        """Forget the step."""
        self._spans.clear()
        self._latest.clear()


def _innermost(spans: list[NodeSpan], number: int) -> NodeSpan | None:
    start = bisect.bisect_right(spans, number, key=_last)
    return next((span for span in spans[start:] if span.first <= number), None)


def _last(span: NodeSpan) -> int:
    return span.last
