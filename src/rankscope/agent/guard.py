"""Between rankscope and the user's program: nothing that fails here may leave here."""

from __future__ import annotations

import contextlib
import functools
import re
import signal
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

from rankscope.capture.torch_internals.compiling import is_compiling
from rankscope.record.texts import without_known_secrets
from rankscope.run.messages import write_to_stderr

MAX_FAILURES = 20
"""Failures inside hooks after which tracing is switched off on this rank, visibly."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_MAX_ERROR_CHARACTERS = 500
_END_CHARACTERS = 200


def say(text: str) -> None:
    """Write one line of rankscope's own to stderr; stdout belongs to the job. Never raises."""
    attempt(write_to_stderr, f"rankscope: {text}\n")


class GuardedHook:
    """Makes a function a hook that never raises and does nothing while a graph is compiled. torch
    receives `run`. Copied and saved modules get an empty hook instead, so that their files can be
    read without rankscope."""

    __slots__ = ("_guard", "body")

    def __init__(self, guard: Guard, body: Callable[..., None]) -> None:
        self._guard = guard
        self.body = body

    def run(self, *arguments: object) -> None:
        """Call `body`. Dynamo sees `is_compiling()` as a constant, so the hook splits no graph."""
        if is_compiling():
            return
        try:
            self.body(*arguments)
        except RecursionError:  # one more call, and this would raise as well
            self._guard.is_too_deep = True
        except Exception as error:  # nothing of ours raises into the program
            if _is_of_a_signal_handler(error):
                raise
            self._guard.failed(error)

    # a tensor saved with it loses nothing: torch need not warn
    run.__torch_unserializable__ = True  # type: ignore[attr-defined]
    # what pickle asks the unpickled object for; nullcontext's takes everything and does nothing
    run.__name__ = "__exit__"

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return contextlib.nullcontext, ()

    def __deepcopy__(self, memo: object) -> GuardedHook:
        return GuardedHook(self._guard, do_nothing)


class Guard:
    """Turns functions into hooks, and counts those that failed."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self.failures = 0
        self.is_too_deep = False
        """A hook found no room on Python's stack, not even for reporting that."""
        self.is_failing = False
        """A failure is being reported: torch is inside a hook of rankscope."""

    def hook(self, body: Callable[..., None]) -> Callable[..., None]:
        """Return `body` as a hook."""
        return GuardedHook(self, body).run

    def failed(self, error: Exception) -> None:
        """Count a failure and report it; reporting must not raise either."""
        self.failures += 1
        self.is_failing = True
        try:
            second = attempt(self._failed, error)
        finally:
            self.is_failing = False
        if second is not None and self.failures == 1:  # the spool may be what failed: said once
            text = f"{text_of(second)} after {text_of(error)}"
            attempt(say, f"cannot record a failure ({text}); the job goes on")


def text_of(error: BaseException) -> str:
    """Return the class of an exception and what it says, the class alone where it cannot say it."""
    texts: list[str] = []
    attempt(lambda: texts.append(str(error)))
    return ": ".join([type(error).__name__, *filter(None, texts)])


def attempt(work: Callable[..., object], *arguments: object) -> Exception | None:
    """Return what `work` raised, unless it is the program's own."""
    try:
        work(*arguments)
    except Exception as error:  # a failed report, or the user's __str__
        if _is_of_a_signal_handler(error):
            raise
        return error
    return None


def do_nothing(*arguments: object) -> None:
    """Be the body of a hook that does nothing."""


def _is_of_a_signal_handler(error: Exception) -> bool:
    """True for what a signal handler of the program raised inside a hook: it must get through."""
    codes: set[object] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if callable(handler):
            with contextlib.suppress(Exception):  # an object of the program may refuse to be asked
                codes.add(_code_of(handler))
    # by code: the handler's frame is in the traceback of whatever it raised into our hook
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _code_of(handler: Any) -> object:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    code = getattr(handler, "__code__", None)
    return getattr(type(handler).__call__, "__code__", None) if code is None else code


def describe_error(error: BaseException) -> str:
    """Return a bounded, address-free text of an exception. Of a long one it has begin and end: an
    exception passed on from another process names the cause in its last line."""
    text = _ADDRESS.sub("0x…", without_known_secrets(text_of(error)))
    if len(text) <= _MAX_ERROR_CHARACTERS:
        return text
    return f"{text[: _MAX_ERROR_CHARACTERS - _END_CHARACTERS]} … {text[-_END_CHARACTERS:]}"
