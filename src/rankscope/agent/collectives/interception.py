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
from typing import Any, Protocol

from rankscope.agent.guard import Guard
from rankscope.capture.collectives import FUNCTIONAL, METHODS
from rankscope.capture.torch_internals.compiling import is_being_captured, is_compiling
from rankscope.capture.torch_internals.distributed import collective_classes, functional_operators

__all__ = ["MESSAGES", "CollectiveListener", "CollectiveWatch"]

_WAITS = ("wait", "synchronize")
_WAIT_TENSORS = (("_c10d_functional", "wait_tensor"), ("_c10d_functional", "wait_tensors"))
MESSAGES = ("send", "recv", "recv_anysource")
"""The methods that have one other rank."""
_COALESCING = ("_start_coalescing", "_end_coalescing")


class CollectiveListener(Protocol):
    """What is called for every collective. It may raise: that is caught, and counted as a failure
    of ours.

    `state` is an empty list made for one call: what `begins` or `waits` leaves in it comes back in
    `ends` and `fails`.
    """

    def begins(
        self,
        state: list[Any],
        name: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A call is about to be made: `target` is a process group, None for an operator."""

    def ends(self, state: list[Any], result: Any) -> None:
        """It returned."""

    def fails(self, state: list[Any], error: BaseException | None) -> None:
        """It raised."""

    def derives(self, work: Any, future: Any) -> None:
        """The program takes a work's future, and may wait for that."""

    def waits(self, state: list[Any], work: Any) -> None:
        """The program waits for a work, or for tensors of functional collectives."""


class _Depth(threading.local):
    """Inside how many of our functions this thread is: what a collective issues by itself is part
    of it.
    """

    inside = 0


class CollectiveWatch:
    """Calls a listener for every collective between `put_on` and `take_off`; both may be called at
    any time.
    """

    def __init__(self, guard: Guard, listener: CollectiveListener) -> None:
        self._begins = guard.hook(listener.begins)
        self._ends = guard.hook(listener.ends)
        self._fails = guard.hook(listener.fails)
        self._waits = guard.hook(listener.waits)
        self._derives = guard.hook(listener.derives)
        self._depth = _Depth()
        self.is_on = False
        self._patched: dict[tuple[int, str], Callable[[], None]] = {}
        """What puts the originals back, by (owner, name) of what is replaced."""

    def put_on(self, *, only_groups: bool = False) -> None:
        """Replace everything that issues a collective or waits for one.

        Args:
            only_groups: leave out the operators of functional collectives.
        """
        classes = collective_classes()
        if classes is None:
            return
        self.is_on = True
        group, work, future = classes
        for name in (*METHODS, *_COALESCING):
            self._patch(group, name, functools.partial(self._issuing, name))
        for name in _WAITS:
            self._patch(work, name, self._waiting)
        self._patch(future, "wait", self._waiting)
        self._patch(work, "get_future", self._deriving)
        if only_groups:
            return
        for name, operator in functional_operators(FUNCTIONAL):
            self._patch(operator, "_op", functools.partial(self._operating, name))
        for _, operator in functional_operators(_WAIT_TENSORS):
            self._patch(operator, "_op", self._waiting)

    def take_off(self) -> None:
        """Put the originals back, but where somebody else has put theirs over ours since."""
        self.is_on = False
        for restore in self._patched.values():
            restore()
        self._patched.clear()

    def _patch(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        kept = vars(owner).get(name)
        if kept is None or (id(owner), name) in self._patched:  # not in this torch, or ours
            return
        original = getattr(owner, name)
        ours = make(original)
        functools.update_wrapper(ours, original)
        setattr(owner, name, ours)

        def restore() -> None:
            if vars(owner).get(name) is ours:
                setattr(owner, name, kept)

        self._patched[id(owner), name] = restore

    # ------------------------------------------------------------------ in place of torch's

    def _is_recorded(self) -> bool:
        return self.is_on and not self._depth.inside and not is_being_captured()

    def _issuing(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_recorded():
                return original(group, *args, **kwargs)
            return self._call(name, group, original, args, kwargs)

        return issue

    def _operating(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operate(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_recorded():
                return original(*args, **kwargs)
            return self._call(name, None, original, args, kwargs)

        return operate

    def _call(
        self,
        name: str,
        group: Any,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        state: list[Any] = []
        self._begins(state, name, group, args, kwargs)
        self._depth.inside += 1
        has_returned = False
        try:
            if group is None:
                result = original(*args, **kwargs)
            else:
                result = original(group, *args, **kwargs)
            has_returned = True
        finally:
            self._depth.inside -= 1
            if not has_returned:
                self._fails(state, sys.exc_info()[1])
        self._ends(state, result)
        return result

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
