"""Queues of work that waits, the events between them, and who made them run.

A stream is a list of entries. `run_to(stream, n)` runs its first n entries, on a thread of its own:
there no mode, no autocast and no grad mode of the program is on, as there is none on a GPU.

`Event.query` runs nothing: on a GPU, too, asking makes nothing happen. A loop that asks until it
hears yes is a wait, so whoever asks one event `MOST_QUERIES` times in vain is counted as waiting,
and all work of that stream runs.

Once an entry has failed the device is in error, as a GPU is behind a failed assertion: every wait
and every query raises the same error from then on.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = [
    "MOST_QUERIES",
    "Event",
    "Stream",
    "Synchronization",
    "current_stream",
    "default_stream",
    "every_stream",
    "refuse_while_capturing",
    "run_to",
    "set_current_stream",
    "stream_of",
    "synchronizing",
    "work",
]

MOST_QUERIES: Final = 50
_DEVICE_TYPE: Final = 20  # c10::DeviceType::PrivateUse1
_HERE: Final = os.path.dirname(__file__)
_TORCH: Final = os.path.dirname(torch.__file__)


@dataclass(frozen=True, slots=True)
class Synchronization:
    """One call that made the host wait for the device."""

    what: str
    origin: str
    """The innermost place that is neither torch nor this accelerator: "file:line function"."""
    stack: tuple[str, ...]
    """The same for all frames, innermost first."""

    @property
    def is_of_rankscope(self) -> bool:
        """True where rankscope made the call, or made somebody make it."""
        return any("/src/rankscope/" in place for place in self.stack)


class _Work:
    """What this process has made the device do."""

    def __init__(self) -> None:
        self.synchronizations: list[Synchronization] = []
        self.mode = "default"
        """As of `torch.cuda.set_sync_debug_mode`: "error" raises."""
        self.entries = Counter[str]()
        """Entries enqueued, by kind: an operator, a copy, a collective."""
        self.captured: list[Callable[[], object]] | None = None
        """Entries of the graph that is being captured, None while none is."""
        self.error: Exception | None = None
        """What the device failed with."""


work = _Work()
_numbers = itertools.count(1)
_lock = threading.RLock()
_per_thread = threading.local()
_streams: list[Stream] = []


class Stream(torch.Stream):
    """One queue."""

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None) -> Any:
        number = next(_numbers) if number is None else number
        made = super().__new__(cls, stream_id=number, device_index=0, device_type=_DEVICE_TYPE)
        made._entries = deque()
        made.enqueued = made.executed = 0
        _streams.append(made)
        return made

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        pass

    def enqueue(self, entry: Callable[[], object], kind: str) -> None:
        """Add one entry."""
        work.entries[kind] += 1
        if work.captured is not None:
            work.captured.append(entry)
            return
        with _lock:
            self._entries.append(entry)
            self.enqueued += 1

    def query(self) -> bool:
        return self.executed >= self.enqueued

    def synchronize(self) -> None:
        with synchronizing("Stream.synchronize"):
            run_to(self, self.enqueued)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        if event.stream is not None:
            stream, position = event.stream, event.position
            self.enqueue(lambda: _advance(stream, position), "wait")

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class Event:
    """A place in a queue."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.stream: Stream | None = None
        self.position = 0
        self._queries = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = current_stream() if stream is None else stream
        self.position = self.stream.enqueued
        self._queries = 0

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """True once the work before it has run."""
        refuse_while_capturing("to ask an event")
        raise_error()
        if self.stream is None or self.stream.executed >= self.position:
            return True
        self._queries += 1
        if self._queries <= MOST_QUERIES:
            return False
        with synchronizing("Event.query, again and again"):
            run_to(self.stream, self.stream.enqueued)
        return True

    def synchronize(self) -> None:
        if self.stream is not None:
            with synchronizing("Event.synchronize"):
                run_to(self.stream, self.position)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


def every_stream() -> list[Stream]:
    """Return all streams of the process."""
    return list(_streams)


def stream_of(number: int) -> Stream:
    """Return the stream that torch knows by this number."""
    return next(stream for stream in _streams if stream.stream_id == number)


def default_stream(device: Any = None) -> Stream:
    """Return the stream that every thread starts with."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """Return the stream of this thread."""
    return getattr(_per_thread, "stream", _default)


def set_current_stream(stream: Stream) -> None:
    """Have this thread enqueue there."""
    _per_thread.stream = stream


def refuse_while_capturing(what: str) -> None:
    """Raise as CUDA does for what breaks the capture of a graph."""
    if work.captured is not None:
        raise RuntimeError(f"a graph is being captured: {what} is not permitted")


def raise_error() -> None:
    """Raise what the device failed with, if it did."""
    if work.error is not None:
        raise RuntimeError(f"the device is in error: {work.error}") from work.error


class synchronizing:
    """Around every wait of the host: counts it with its place, or raises in the mode "error"."""

    def __init__(self, what: str) -> None:
        refuse_while_capturing(what)
        stack = _stack()
        found = Synchronization(what, stack[0] if stack else "autograd", stack)
        if work.mode == "error":
            raise RuntimeError(f"called a synchronizing operation: {what}, at {found.origin}")
        work.synchronizations.append(found)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def _stack() -> tuple[str, ...]:
    """Return the places on this thread's stack that are neither torch nor this accelerator."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if os.path.dirname(file) == _HERE:
            is_own = not os.path.basename(file).startswith("test_")
        else:
            is_own = file.startswith((_TORCH, "<"))
        if not is_own:
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


# ---- the device's own thread --------------------------------------------------------------------


class _Runner:
    """Runs entries on a thread that belongs to no program."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Stream, int, threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0

    def run(self, stream: Stream, position: int) -> None:
        if threading.current_thread() is self._thread:
            _advance(stream, position)
            return
        with _lock:
            if self._thread is None or self._process != os.getpid():
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._serve, name="late", daemon=True)
                self._thread.start()
        answer = threading.Event()
        self._asked.put((stream, position, answer))
        answer.wait()
        raise_error()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        while True:
            stream, position, answer = self._asked.get()
            try:
                with torch.inference_mode():  # host memory of a program may have been made in it
                    _advance(stream, position)
            except BaseException as error:
                answer.error = error
            answer.set()
            del stream, answer


def _advance(stream: Stream, position: int) -> None:
    while stream.executed < position:
        entry = stream._entries.popleft()
        try:
            if work.error is None:
                entry()
        except Exception as error:
            work.error = error
        stream.executed += 1


_runner = _Runner()
_default = Stream(number=0)


def run_to(stream: Stream, position: int) -> None:
    """Run the first `position` entries of a stream, and all that they wait for."""
    raise_error()
    if stream.executed < position:
        _runner.run(stream, position)
