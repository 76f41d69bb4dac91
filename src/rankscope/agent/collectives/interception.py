"""Standing in for what issues collectives, while a traced step runs and not a moment longer.

Python's collectives all go through methods of torch's class ProcessGroup or through the operators
of functional collectives, whatever name they were imported under. A function of ours stands in each
of these for a traced step: it tells of the call, calls the original with the very same arguments
and returns its result, or lets out what it raised.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from rankscope.agent.collectives.recording import Collectives
from rankscope.agent.guard import Guard
from rankscope.agent.standins import StandIns
from rankscope.capture.collectives import FUNCTIONAL, METHODS
from rankscope.capture.torch_internals.compiling import is_being_captured, is_compiling
from rankscope.capture.torch_internals.distributed import collective_classes, functional_operators

__all__ = ["MESSAGES", "CollectiveWatch"]

_WAITS = ("wait", "synchronize")
_WAIT_TENSORS = (("_c10d_functional", "wait_tensor"), ("_c10d_functional", "wait_tensors"))
MESSAGES = ("send", "recv", "recv_anysource")
"""The methods that have one other rank."""
_COALESCING = ("_start_coalescing", "_end_coalescing")


class _Depth(threading.local):
    """How deep this thread is in our functions: what a collective issues is part of it."""

    inside = 0


class CollectiveWatch(StandIns):
    """Tells of every collective between `put_on` and `take_off`; both may be called at any time.

    An empty list is made for each call: what `begins` or `waits` of `Collectives` leaves in it
    comes back in `ends` and `fails`. What they raise is caught, and counted as a failure of ours.
    """

    def __init__(self, guard: Guard, listener: Collectives) -> None:
        super().__init__()
        self._begins = guard.hook(listener.begins)
        self._ends = guard.hook(listener.ends)
        self._fails = guard.hook(listener.fails)
        self._waits = guard.hook(listener.waits)
        self._derives = guard.hook(listener.derives)
        self._depth = _Depth()

    def put_on(self, *, only_groups: bool = False) -> None:
        """Replace everything that issues a collective or waits for one.

        Args:
            only_groups: leave out the operators of functional collectives.
        """
        classes = collective_classes()
        if classes is None:
            return
        group, work, future = classes
        put = self.put
        for name in (*METHODS, *_COALESCING):
            put(group, name, functools.partial(self._issuing, name, True))
        for name in _WAITS:
            put(work, name, self._waiting)
        put(future, "wait", self._waiting)
        put(work, "get_future", self._deriving)
        if only_groups:
            return
        for name, operator in functional_operators(FUNCTIONAL):
            put(operator, "_op", functools.partial(self._issuing, name, False))
        for _, operator in functional_operators(_WAIT_TENSORS):
            put(operator, "_op", self._waiting)

    # ------------------------------------------------------------------ in place of torch's

    def _is_recorded(self) -> bool:
        return self.is_on and not self._depth.inside and not is_being_captured()

    def _issuing(
        self, name: str, is_method: bool, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return what stands for a method of a process group, or for an operator."""

        def issue(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_recorded():
                return original(*args, **kwargs)
            state: list[Any] = []
            target, given = (args[0], args[1:]) if is_method and args else (None, args)
            self._begins(state, name, target, given, kwargs)
            self._depth.inside += 1
            has_returned = False
            try:
                result = original(*args, **kwargs)
                has_returned = True
            finally:
                self._depth.inside -= 1
                if not has_returned:
                    self._fails(state, sys.exc_info()[1])
            self._ends(state, result)
            return result

        return issue

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_recorded():
                return original(work, *args, **kwargs)
            state: list[Any] = []
            self._waits(state, work)
            has_returned = False
            try:
                result = original(work, *args, **kwargs)
                has_returned = True
            finally:
                if not has_returned:
                    self._fails(state, sys.exc_info()[1])
            self._ends(state, result)
            return result

        return wait

    def _deriving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def derive(work: Any) -> Any:
            future = original(work)
            if not is_compiling() and self._is_recorded():
                self._derives(work, future)
            return future

        return derive
