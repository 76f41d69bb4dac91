"""The collectives of a session: how and when they are watched, and where in a step each belongs.

Python's collectives all go through methods of torch's class ProcessGroup or through the operators
of functional collectives, under whatever name. In a traced step a function of ours stands in each:
it tells of the call, calls the original and returns or raises what that does.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from rankscope.agent.collectives.recording import Collectives
from rankscope.agent.guard import Guard
from rankscope.agent.hooks.callstack import EventPlace, NodeMap, NodeSpan
from rankscope.agent.hooks.members import own_parameters
from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable
from rankscope.agent.hooks.tracer import Tracer
from rankscope.agent.recorder import Recorder
from rankscope.agent.standins import StandIns
from rankscope.agent.steps.stepmachine import RunningStep
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.collectives import FUNCTIONAL, METHODS
from rankscope.capture.torch_internals.autograd import current_graph_task, current_node
from rankscope.capture.torch_internals.compiling import is_being_captured, is_compiling
from rankscope.capture.torch_internals.distributed import collective_classes, functional_operators
from rankscope.capture.torch_internals.parallel import sharded_module_in_hand
from rankscope.globs import glob_matches
from rankscope.record.call import Mode
from rankscope.record.collective import MESSAGES
from rankscope.record.phases import Phase
from rankscope.settings import Settings

_WAITS = ("wait", "synchronize")
_WAIT_TENSORS = (("_c10d_functional", "wait_tensor"), ("_c10d_functional", "wait_tensors"))
_COALESCING = ("_start_coalescing", "_end_coalescing")


class _Depth(threading.local):
    """How deep this thread is in our functions: what a collective issues is part of it."""

    inside = 0


class CollectiveWatch(StandIns):
    """Tells of every collective between `put_on` and `take_off`; both may be called at any time.
    Each call has a list: what `begins` or `waits` leaves in it comes back in `ends` and `fails`."""

    def __init__(self, guard: Guard, listener: Collectives) -> None:
        super().__init__()
        self._begins = guard.hook(listener.begins)
        self._ends = guard.hook(listener.ends)
        self._fails = guard.hook(listener.fails)
        self._waits = guard.hook(listener.waits)
        self._derives = guard.hook(listener.derives)
        self._depth = _Depth()

    def put_on(self, *, only_groups: bool = False) -> None:
        """Replace what issues a collective or waits for one; `only_groups`: no operators."""
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


class CollectiveTracing:
    """Watches collectives for one session."""

    def __init__(
        self,
        guard: Guard,
        settings: Settings,
        open_session: Callable[[], bool],
        running: Callable[[bool], RunningStep | None],
    ) -> None:
        """`open_session` opens the spool and calls `open`; False where this process is not traced.
        `running` returns the traced step of what runs outside every module call; told whether that
        is a send or a receive."""
        self._open_session = open_session
        self._running = running
        self._is_wanted = Phase.COLLECTIVE.word in settings.phases
        self._paths = settings.paths
        self.select_too(())
        self._collectives = Collectives(self._place)
        self._messages = self._collectives.messages
        self._watch = CollectiveWatch(guard, self._collectives)
        self._nodes = NodeMap()
        self._owners: dict[int, ModuleInfo] = {}
        """By the identity of a parameter; made in a step that asks."""
        self._tracer: Tracer | None = None
        self.awaits_first = False
        """No step and no run of a schedule has begun: what is not a message builds a model."""

    def open(
        self, recorder: Recorder, values: ValueReader, tracer: Tracer, table: ModuleTable
    ) -> None:
        """Take what an open spool gives."""
        self._recorder, self._tracer, self._table = recorder, tracer, table
        self._outside = 0
        self._collectives.open(recorder, values)

    def expect_step(self, *, is_first: bool) -> None:
        """Watch before the next step: a pipeline stage receives before its first forward of a step.
        Before the `is_first` one, collectives that build a model are left alone."""
        self.awaits_first = is_first
        if self._is_wanted:
            self._watch.put_on(only_groups=is_first)
        if is_first:
            self._messages.begin("start")

    def select_too(self, paths: tuple[str, ...]) -> None:
        """Take collectives outside every module call where the setting or these globs take ""."""
        self._takes_outside = any(glob_matches(glob, "") for glob in (*self._paths, *paths))

    def count_messages_from(self, point: str) -> None:
        """Number messages from here on, where every rank does: see `Collective.since`."""
        if self._watch.is_on:
            self._messages.begin(point)

    def put_on(self) -> None:
        """Watch while a traced step runs; safe to call again."""
        self.awaits_first = False
        if self._is_wanted and self._tracer is not None:
            self._watch.put_on()
            self._tracer.nodes = self._nodes

    def take_off(self) -> None:
        """Leave torch as it was; safe to call in any state."""
        self._watch.take_off()
        self._messages.lose()
        self._nodes.clear()
        if self._tracer is not None:
            self._tracer.nodes = None

    def end_step(self, mode: Mode, step: int) -> None:
        """Close what is open of a step."""
        self._nodes.clear()
        self._owners.clear()
        self._collectives.end_step(mode, step)

    def close(self) -> None:
        """Close whatever is open: the session ends."""
        self._collectives.end_step(None, None)

    # ------------------------------------------------------------------ places

    def _place(self, name: str) -> EventPlace | None:
        is_message = name in METHODS and METHODS[name].op in MESSAGES
        place = None
        if self._tracer is not None or (self._running(is_message) and self._open_session()):
            place = self._place_of(is_message)
        if place is None and is_message:
            self._messages.lose()
        return place

    def _place_of(self, is_message: bool) -> EventPlace | None:
        tracer = self._tracer
        assert tracer is not None  # the session is open
        frame = tracer.frame_around()
        if frame is not None:
            return tracer.place_in(frame.info, frame.scope, frame.sequence, frame.phase.word)
        issuer = "outside"
        if current_graph_task() != -1:
            span = self._span_in_backward()
            if span is not None:
                return tracer.place_in(span.info, span.scope, span.sequence, "backward")
            issuer = "backward"
        running = self._running(is_message)
        if running is None:
            return None
        if running.is_inside_optimizer:
            issuer = "optimizer"
        if not self._outside:
            self._outside = self._recorder.define(
                "module", root=0, path="", raw_path="", wrappers=(), opaque=False, **{"class": ""}
            )
        return EventPlace(
            self._outside, 0, None, running.mode, running.step, None, issuer, self._takes_outside,
            "",
        )  # fmt: skip

    def _span_in_backward(self) -> NodeSpan | None:
        node = current_node()
        if node is None:  # behind the graph: what a callback of the whole backward pass runs
            module = sharded_module_in_hand()
            info = self._table.get(module) if module is not None else None
            return None if info is None else self._nodes.latest(info)
        number, leaf = node
        return self._nodes.find(number) if leaf is None else self._span_of_owner(leaf)

    def _span_of_owner(self, parameter: torch.Tensor) -> NodeSpan | None:
        if not self._owners:
            for root in self._table.roots:
                for info, module in self._table.of_root(root):
                    owned = own_parameters(module)
                    self._owners.update((id(owned[n]), info) for n in info.own_parameters)
        owner = self._owners.get(id(parameter))
        return None if owner is None else self._nodes.latest(owner)
