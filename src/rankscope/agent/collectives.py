"""The collectives of a session: how and when they are watched, where in a step each belongs, and
how they are recorded as calls, from their issue to their return or to the wait for them.

Python's collectives all go through methods of torch's class ProcessGroup or through the operators
of functional collectives, under whatever name. In a traced step a function of ours stands in each:
it tells of the call, calls the original and returns or raises what that does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rankscope.agent.guard import Guard, describe_error
from rankscope.agent.hooks.calls import EventPlace, NodeMap, NodeSpan
from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable, own_parameters
from rankscope.agent.hooks.tracer import Tracer
from rankscope.agent.pythonstack import call_site
from rankscope.agent.recorder import Recorder
from rankscope.agent.steps.optimizers import StandIns
from rankscope.agent.steps.stepmachine import RunningStep
from rankscope.agent.values.valuereader import ValueReader, memory_of, overlaps
from rankscope.capture.collectives import (
    FUNCTIONAL,
    METHODS,
    CallOrigin,
    Groups,
    IssuedCall,
    read_functional,
    read_method,
    tensors_in,
    unread_call,
)
from rankscope.capture.torch_internals.autograd import current_graph_task, current_node
from rankscope.capture.torch_internals.compiling import is_being_captured, is_compiling
from rankscope.capture.torch_internals.distributed import (
    collective_classes,
    functional_operators,
    sharded_module_in_hand,
)
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.globs import glob_matches
from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import MESSAGES, Collective
from rankscope.record.value import ValueFlag
from rankscope.settings import Settings

_COALESCED = "coalesced"
_PENDING = int(ValueFlag.PENDING)
_Key = tuple[Hashable, ...]
_OPERATORS = {name: op for (_, name), op in FUNCTIONAL.items()}


@dataclass(eq=False, slots=True)
class _PendingCollective:
    sequence: int
    place: EventPlace
    is_object: bool
    outputs: tuple[torch.Tensor, ...]
    """Memory that the call writes, held until the call has ended."""
    issued: int
    is_functional: bool
    """The call returns the memory it writes: there is no work object to wait for."""
    is_ended: bool = False
    is_overwritten: bool = False
    """Another call may have written the same elements meanwhile, so this call's output is
    unknown."""


class _Coalescing(threading.local):
    """The calls made on this thread between the begin and the end of a coalesced group."""

    calls: list[_PendingCollective] | None = None


class MessageCount:
    """Numbers the sends and receives of each channel from a point that all ranks share. The k-th
    send of a channel is its k-th receive, but perhaps in another step, because a stage receives
    before its own step begins. An unseen message ends the count until the next such point."""

    def __init__(self) -> None:
        self.since = ""
        self._counts: dict[_Key, itertools.count[int]] = {}

    def begin(self, since: str) -> None:
        """Count from here on; a count that has lasted from the start goes on."""
        if self.since != "start":
            self.since = since
            self._counts.clear()

    def lose(self) -> None:
        """A message is not seen, or was not."""
        self.since = ""

    def next(self, collective: Collective) -> int:
        """Return the number of a message of a channel."""
        return next(self._counts.setdefault(_channel(collective), itertools.count()))


class Collectives:
    """The collectives of one session's traced steps, as `CollectiveWatch` reports them."""

    def __init__(self, place: Callable[[str], EventPlace | None]) -> None:
        """`place` returns where in which traced step this thread is; it calls `open` before."""
        self.messages = MessageCount()
        self._place = place
        self._groups = Groups()
        self._ordinals: dict[_Key, itertools.count[int]] = {}
        self._numbers: dict[_Key, itertools.count[int]] = {}
        self._open: dict[int, _PendingCollective] = {}
        self._works: dict[int, tuple[weakref.ref[Any], list[_PendingCollective]]] = {}
        """By identity of a work: the work and its calls, several where they were coalesced."""
        self._memory: dict[int | None, _PendingCollective] = {}
        """By the storage that a functional collective writes."""
        self._coalescing = _Coalescing()

    def open(self, recorder: Recorder, values: ValueReader) -> None:
        """Write calls, and what is read of their tensors, here."""
        self._recorder, self._values = recorder, values

    # ------------------------------------------------------------------ a collective is issued

    def begins(
        self,
        state: list[Any],
        name: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A collective is about to be issued: `target` is a process group, None for an operator."""
        if name == "_start_coalescing":
            self._coalescing.calls = []
            return
        if name == "_end_coalescing":
            state.append(self._coalescing.calls or [])
            state.append(_COALESCED)
            self._coalescing.calls = None
            return
        place = self._place(name)
        if place is None:
            return
        where = CallOrigin(place.issuer, call_site())
        with invisible():
            is_functional = target is None
            # What cannot be read is recorded as of no known group: left out, it would shift the
            # numbers of what follows on this rank.
            issued = unread_call(_OPERATORS[name] if is_functional else METHODS[name].op, where)
            try:
                if is_functional:
                    issued = read_functional(_OPERATORS[name], args, kwargs, self._groups, where)
                else:
                    issued = read_method(name, target, args, kwargs, self._groups, where)
            finally:
                state.append(self._record(issued, place, is_functional=is_functional))

    def ends(self, state: list[Any], result: Any) -> None:
        """The call returned; a collective with a work to wait for goes on."""
        if not state:
            return
        calls = state[0]
        if state[-1] is _COALESCED and result is not None:
            self._follow(result, calls)
        elif isinstance(calls, list):  # what was waited for
            for call in calls:
                self._finish(call)
        # a functional collective has no work object: its wait comes as `wait_tensor` of its memory
        elif calls.is_functional:
            self._follow_memory(calls, result)
        elif result is None:
            # without a work the call is over, but for one inside a coalesced group: the end of the
            # group hands out the work of all
            if self._coalescing.calls is None:
                self._finish(calls)
        else:
            self._follow(result, [calls])

    def fails(self, state: list[Any], error: BaseException | None) -> None:
        """The call raised."""
        text = "" if error is None else describe_error(error)
        # empty where `begins` left the call alone, or failed itself
        for calls in state[:1]:
            for call in calls if isinstance(calls, list) else [calls]:
                self._break_off(call, CallStatus.RAISED, text)

    def waits(self, state: list[Any], work: Any) -> None:
        """The program waits for a work, or for memory that a functional collective writes."""
        if isinstance(work, (torch.Tensor, list)):
            with invisible():
                # popped: the first wait ends the call, and a later one for the same memory is of
                # another
                writers = [self._memory.pop(memory_of(tensor), None) for tensor in tensors_in(work)]
            state.append([call for call in writers if call is not None])
            return
        entry = self._works.get(id(work))
        if entry is not None and entry[0]() is work:
            del self._works[id(work)]
            state.append(entry[1])

    def derives(self, work: Any, future: Any) -> None:
        """The program takes a work's future: waiting for that ends the same calls."""
        entry = self._works.get(id(work))
        if entry is not None and entry[0]() is work:
            self._follow(future, entry[1])

    # ------------------------------------------------------------------ what is recorded

    def _record(
        self, issued: IssuedCall, place: EventPlace, *, is_functional: bool
    ) -> _PendingCollective:
        collective = issued.collective
        ordinal = self._next(
            self._ordinals, (place.mode, place.step, place.micro_batch, place.module)
        )
        # a receive from any source is of no channel that both sides could number
        if collective.op in MESSAGES and collective.peer is None:
            self.messages.lose()
        if collective.peer is not None and self.messages.since:
            collective = dataclasses.replace(collective, since=self.messages.since)
            number = self.messages.next(collective)
        else:
            number = self._next(self._numbers, (place.mode, place.step, *_channel(collective)))
        # ENTER before the inputs are read and the call is made: a rank that hangs or dies in it
        # shows it as open
        sequence = self._recorder.enter(
            *place[:6], Phase.COLLECTIVE, ordinal, 0, self._recorder.collective(collective), number
        )
        call = _PendingCollective(
            sequence, place, collective.is_object, issued.outputs, issued.number, is_functional
        )
        self._open[sequence] = call
        if self._coalescing.calls is not None:
            self._coalescing.calls.append(call)
        self._read(call, "input", issued.inputs)
        # two calls write the same elements at once: neither output is its own
        if any(map(self._values.in_flight.has, call.outputs)):
            for open_call in list(self._open.values()):
                if open_call is not call and overlaps(call.outputs, open_call.outputs):
                    call.is_overwritten = open_call.is_overwritten = True
        self._values.in_flight.add(call.outputs)
        return call

    def _next(self, counts: dict[_Key, itertools.count[int]], key: _Key) -> int:
        count = counts.get(key)
        return next(counts.setdefault(key, itertools.count()) if count is None else count)

    def _follow(self, work: Any, calls: list[_PendingCollective]) -> None:
        entry = self._works.get(id(work))
        if entry is None or entry[0]() is not work:
            # weak: a work that the program drops has to go when it would have gone without us
            entry = self._works[id(work)] = weakref.ref(work), []
        entry[1].extend(calls)

    def _follow_memory(self, call: _PendingCollective, result: Any) -> None:
        with invisible():
            call.outputs = tuple(tensors_in(result))
            self._values.in_flight.add(call.outputs)
            for tensor in call.outputs:
                self._memory[memory_of(tensor)] = call

    def _finish(self, call: _PendingCollective) -> None:
        if call.is_ended:
            return
        with invisible():
            outputs = self._release(call)
            if call.is_overwritten:
                self._leave_unread(call, outputs)
            else:
                self._read(call, "output", outputs)
        # EXIT behind the values: a reader of the end has read all of the call
        self._recorder.exit(call.sequence, issued=call.issued)
        self._values.read_pending()

    def _break_off(self, call: _PendingCollective, status: CallStatus, text: str = "") -> None:
        if call.is_ended:
            return
        with invisible():
            self._values.forget_pending(call.outputs)
            outputs = self._release(call)
            # nobody waited: the backend may still be writing these bytes
            if status is CallStatus.NOT_WAITED:
                self._leave_unread(call, outputs)
        self._recorder.exit(call.sequence, status, text, issued=call.issued)

    def _release(self, call: _PendingCollective) -> tuple[torch.Tensor, ...]:
        outputs, call.outputs, call.is_ended = call.outputs, (), True
        self._open.pop(call.sequence, None)
        self._values.in_flight.remove(outputs)
        return outputs

    def _read(self, call: _PendingCollective, kind: str, tensors: tuple[torch.Tensor, ...]) -> None:
        for slot, tensor in self._selected(call, kind, tensors):
            if call.is_object:
                self._values.describe(tensor, call.sequence, slot, Phase.COLLECTIVE)
            else:
                self._values.read(
                    tensor, call.sequence, call.place.path, slot, Phase.COLLECTIVE, samples=False
                )

    def _leave_unread(self, call: _PendingCollective, outputs: tuple[torch.Tensor, ...]) -> None:
        for slot, tensor in self._selected(call, "output", outputs):
            self._values.describe(tensor, call.sequence, slot, Phase.COLLECTIVE, _PENDING)

    def _selected(
        self, call: _PendingCollective, kind: str, tensors: tuple[torch.Tensor, ...]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if call.place.is_selected and self._values.is_on:
            for number, tensor in enumerate(tensors):
                if self._values.wants(slot := f"{kind}.{number}"):
                    yield slot, tensor

    def end_step(self, mode: Mode | None, step: int | None) -> None:
        """Close the collectives of a step that nobody has waited for; without a mode, all."""
        for call in list(self._open.values()):
            if mode is None or (call.place.mode, call.place.step) == (mode, step):
                self._break_off(call, CallStatus.NOT_WAITED)
        self._works = {
            key: (work, calls)
            for key, (work, calls) in self._works.items()
            if not all(call.is_ended for call in calls)
        }
        self._memory = {k: call for k, call in self._memory.items() if not call.is_ended}
        for counts in (self._ordinals, self._numbers):
            for key in [key for key in counts if mode is None or key[:2] == (mode, step)]:
                del counts[key]


def _channel(collective: Collective) -> _Key:
    """Return what the k-th call of one rank and of another must share to be one collective."""
    if collective.op not in MESSAGES:
        return (collective.group,)
    return collective.group, collective.op, collective.peer, collective.tag


_WAITS = ("wait", "synchronize")
_WAIT_TENSORS = (("_c10d_functional", "wait_tensor"), ("_c10d_functional", "wait_tensors"))
_COALESCING = ("_start_coalescing", "_end_coalescing")


class _Depth(threading.local):
    """How deep this thread is in our functions: what a collective issues is part of it."""

    inside = 0


class CollectiveWatch(StandIns):
    """Reports every collective between `install` and `uninstall`, which may be called at any time.
    Each call has a list: entries of `begins` or `waits` come back in `ends` and `fails`."""

    def __init__(self, guard: Guard, listener: Collectives) -> None:
        super().__init__()
        self._begins = guard.hook(listener.begins)
        self._ends = guard.hook(listener.ends)
        self._fails = guard.hook(listener.fails)
        self._waits = guard.hook(listener.waits)
        self._derives = guard.hook(listener.derives)
        self._depth = _Depth()

    def install(self, *, only_groups: bool = False) -> None:
        """Replace what issues a collective or waits for one; `only_groups`: no operators."""
        classes = collective_classes()
        if classes is None:
            return
        group, work, future = classes
        replace = self.replace
        for name in (*METHODS, *_COALESCING):
            replace(group, name, functools.partial(self._issuing, name, True))
        for name in _WAITS:
            replace(work, name, self._around_wait)
        replace(future, "wait", self._around_wait)
        replace(work, "get_future", self._deriving)
        if only_groups:
            return
        for name, operator in functional_operators(FUNCTIONAL):
            replace(operator, "_op", functools.partial(self._issuing, name, False))
        for _, operator in functional_operators(_WAIT_TENSORS):
            replace(operator, "_op", self._around_wait)

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
            target, arguments = (args[0], args[1:]) if is_method and args else (None, args)
            # before the original: an in-place collective overwrites its inputs
            self._begins(state, name, target, arguments, kwargs)
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

    def _around_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
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
        """`open_session` opens the spool and calls `open`; False if this process is not traced.
        `running` takes whether the call is a send or a receive, and returns the traced step of a
        call outside every module call."""
        self._open_session = open_session
        self._running_step = running
        self._is_wanted = Phase.COLLECTIVE.word in settings.phases
        self._paths = settings.paths
        self.select_also(())
        self._collectives = Collectives(self._place)
        self._messages = self._collectives.messages
        self._watch = CollectiveWatch(guard, self._collectives)
        self._nodes = NodeMap()
        self._owners: dict[int, ModuleInfo] = {}
        """By identity of a parameter; filled in by the first step that asks."""
        self._tracer: Tracer | None = None
        self.awaits_first = False
        """No step and no schedule run has begun: collectives other than messages build a model."""

    def open(
        self, recorder: Recorder, values: ValueReader, tracer: Tracer, table: ModuleTable
    ) -> None:
        """Use an open spool."""
        self._recorder, self._tracer, self._table = recorder, tracer, table
        self._outside = 0
        self._collectives.open(recorder, values)

    def expect_step(self, *, is_first: bool) -> None:
        """Watch before the next step: a pipeline stage receives before its first forward of a step.
        Before the `is_first` one, collectives that build a model are left alone."""
        self.awaits_first = is_first
        if self._is_wanted:
            self._watch.install(only_groups=is_first)
        if is_first:
            self._messages.begin("start")

    def select_also(self, paths: tuple[str, ...]) -> None:
        """Take collectives outside every module call if the setting or these globs match ""."""
        self._takes_outside = any(glob_matches(glob, "") for glob in (*self._paths, *paths))

    def count_messages_from(self, point: str) -> None:
        """Number messages from here on, where every rank does: see `Collective.since`."""
        if self._watch.is_on:
            self._messages.begin(point)

    def install(self) -> None:
        """Watch while a traced step runs; safe to call again."""
        self.awaits_first = False
        if self._is_wanted and self._tracer is not None:
            self._watch.install()
            self._tracer.nodes = self._nodes

    def uninstall(self) -> None:
        """Leave torch as it was; safe to call in any state."""
        self._watch.uninstall()
        self._messages.lose()
        self._nodes.clear()
        if self._tracer is not None:
            self._tracer.nodes = None

    def end_step(self, mode: Mode, step: int) -> None:
        """Close the open collectives of a step."""
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
        if self._tracer is not None or (self._running_step(is_message) and self._open_session()):
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
        running = self._running_step(is_message)
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
        # by identity, and so for one step alone: a parameter that is replaced may leave its address
        # to another
        if not self._owners:
            for root in self._table.roots:
                for info, module in self._table.of_root(root):
                    owned = own_parameters(module)
                    self._owners.update((id(owned[n]), info) for n in info.own_parameters)
        owner = self._owners.get(id(parameter))
        return None if owner is None else self._nodes.latest(owner)
