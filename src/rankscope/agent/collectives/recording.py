"""Records collectives as calls: from their issue to their return, or to the wait for them."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rankscope.agent.collectives.busymemory import memory_of, overlaps
from rankscope.agent.guard import describe_error
from rankscope.agent.hooks.callstack import EventPlace
from rankscope.agent.hooks.pythonstack import call_site
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.collectives import (
    FUNCTIONAL,
    METHODS,
    Groups,
    Issued,
    Where,
    read_functional,
    read_method,
    tensors_in,
    unread,
)
from rankscope.capture.invisible import invisible
from rankscope.record.call import CallStatus, Mode
from rankscope.record.collective import MESSAGES, Collective
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag

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
    """Memory it writes, held until it has ended."""
    issued: int
    is_functional: bool
    """What it returns is what it writes: there is no work to wait for."""
    is_ended: bool = False
    is_overwritten: bool = False
    """Another call may have written the same elements meanwhile: nobody knows what this one did."""


class _Coalescing(threading.local):
    """The calls made on this thread between the begin and the end of a coalesced group."""

    calls: list[_PendingCollective] | None = None


class MessageCount:
    """Numbers the sends and receives of each channel since a point that all ranks have in common.
    The k-th send of a channel is its k-th receive; their steps may differ, because a stage receives
    before its own step begins. A message that is not seen ends the count until the next point."""

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
    """The collectives of one session's traced steps, as `CollectiveWatch` tells of them."""

    def __init__(self, place: Callable[[str], EventPlace | None]) -> None:
        """`place` returns where in which traced step this thread is; it calls `open` before."""
        self.messages = MessageCount()
        self._place = place
        self._groups = Groups()
        self._ordinals: dict[_Key, itertools.count[int]] = {}
        self._numbers: dict[_Key, itertools.count[int]] = {}
        self._open: dict[int, _PendingCollective] = {}
        self._works: dict[int, tuple[weakref.ref[Any], list[_PendingCollective]]] = {}
        """By the identity of a work: itself, and its calls: several where they were coalesced."""
        self._memory: dict[int | None, _PendingCollective] = {}
        """By the storage a functional collective writes."""
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
        where = Where(place.issuer, call_site())
        with invisible():
            is_functional = target is None
            # What cannot be read is recorded as of no known group: left out, it would shift the
            # numbers of what follows on this rank.
            issued = unread(_OPERATORS[name] if is_functional else METHODS[name].op, where)
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
        found = state[0]
        if state[-1] is _COALESCED and result is not None:
            self._follow(result, found)
        elif isinstance(found, list):  # what was waited for
            for call in found:
                self._finish(call)
        elif found.is_functional:
            self._follow_memory(found, result)
        elif result is None:
            if self._coalescing.calls is None:
                self._finish(found)
        else:
            self._follow(result, [found])

    def fails(self, state: list[Any], error: BaseException | None) -> None:
        """The call raised."""
        text = "" if error is None else describe_error(error)
        for found in state[:1]:
            for call in found if isinstance(found, list) else [found]:
                self._break_off(call, CallStatus.RAISED, text)

    def waits(self, state: list[Any], work: Any) -> None:
        """The program waits for a work, or for memory that a functional collective writes."""
        if isinstance(work, (torch.Tensor, list)):
            with invisible():
                writers = [self._memory.pop(memory_of(each), None) for each in tensors_in(work)]
            state.append([call for call in writers if call is not None])
            return
        known = self._works.get(id(work))
        if known is not None and known[0]() is work:
            del self._works[id(work)]
            state.append(known[1])

    def derives(self, work: Any, future: Any) -> None:
        """The program takes a work's future: waiting for that ends the same calls."""
        known = self._works.get(id(work))
        if known is not None and known[0]() is work:
            self._follow(future, known[1])

    # ------------------------------------------------------------------ what is recorded

    def _record(
        self, issued: Issued, place: EventPlace, *, is_functional: bool
    ) -> _PendingCollective:
        collective = issued.collective
        ordinal = self._next(
            self._ordinals, (place.mode, place.step, place.micro_batch, place.module)
        )
        if collective.op in MESSAGES and collective.peer is None:
            self.messages.lose()
        if collective.peer is not None and self.messages.since:
            collective = dataclasses.replace(collective, since=self.messages.since)
            number = self.messages.next(collective)
        else:
            number = self._next(self._numbers, (place.mode, place.step, *_channel(collective)))
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
        if any(map(self._values.in_flight.has, call.outputs)):
            for other in list(self._open.values()):
                if other is not call and overlaps(call.outputs, other.outputs):
                    call.is_overwritten = other.is_overwritten = True
        self._values.in_flight.add(call.outputs)
        return call

    def _next(self, counts: dict[_Key, itertools.count[int]], key: _Key) -> int:
        count = counts.get(key)
        return next(counts.setdefault(key, itertools.count()) if count is None else count)

    def _follow(self, work: Any, calls: list[_PendingCollective]) -> None:
        known = self._works.get(id(work))
        if known is None or known[0]() is not work:
            known = self._works[id(work)] = weakref.ref(work), []
        known[1].extend(calls)

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
        self._recorder.exit(call.sequence, issued=call.issued)
        self._values.read_pending()

    def _break_off(self, call: _PendingCollective, status: CallStatus, text: str = "") -> None:
        if call.is_ended:
            return
        with invisible():
            self._values.forget_pending(call.outputs)
            outputs = self._release(call)
            if status is CallStatus.NOT_WAITED:
                self._leave_unread(call, outputs)
        self._recorder.exit(call.sequence, status, text, issued=call.issued)

    def _release(self, call: _PendingCollective) -> tuple[torch.Tensor, ...]:
        outputs, call.outputs, call.is_ended = call.outputs, (), True
        self._open.pop(call.sequence, None)
        self._values.in_flight.remove(outputs)
        return outputs

    def _read(self, call: _PendingCollective, kind: str, tensors: tuple[torch.Tensor, ...]) -> None:
        for slot, tensor in self._wanted(call, kind, tensors):
            if call.is_object:
                self._values.describe(tensor, call.sequence, slot, Phase.COLLECTIVE)
            else:
                self._values.read(
                    tensor, call.sequence, call.place.path, slot, Phase.COLLECTIVE, samples=False
                )

    def _leave_unread(self, call: _PendingCollective, outputs: tuple[torch.Tensor, ...]) -> None:
        for slot, tensor in self._wanted(call, "output", outputs):
            self._values.describe(tensor, call.sequence, slot, Phase.COLLECTIVE, _PENDING)

    def _wanted(
        self, call: _PendingCollective, kind: str, tensors: tuple[torch.Tensor, ...]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if call.place.is_selected and self._values.is_on:
            for number, tensor in enumerate(tensors):
                if self._values.wants(slot := f"{kind}.{number}"):
                    yield slot, tensor

    def end_step(self, mode: Mode | None, step: int | None) -> None:
        """Close what nobody has waited for in a step; everything without a mode."""
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
