"""How a program ends: by which exception or exit code, and at which of its lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from rankscope.agent.guard import attempt, describe_error
from rankscope.agent.hooks.pythonstack import call_site, raise_site

_MOST_CAUSES = 8
_UNREMARKABLE = (None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The exception that ends a program, in words: the exception itself would keep tensors."""

    error: str
    causes: tuple[str, ...]
    """The same of what it was raised from, or while handling; the nearest first."""
    where: str
    """`file.py:12 function` of the innermost line of the program, "" where there is none."""


def what_ends_the_program() -> Raised | None:
    """Return the uncaught exception, or the exit code other than 0, that ends this process. The
    interpreter notes an exception before it runs `atexit`, but not a SystemExit; a process of
    `multiprocessing` ends while either is being handled."""
    running = uncaught()
    if running is None:
        return _exiting
    if isinstance(running, SystemExit) and running.code in _UNREMARKABLE:
        return None
    return _raised_of(running)


def uncaught() -> BaseException | None:
    """Return the exception that ends this process, None where it ends by none that is known."""
    running = sys.exc_info()[1]
    if running is not None:
        return running
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    return None if is_interactive else getattr(sys, "last_value", None)


def _raised_of(error: BaseException, at: str = "") -> Raised:
    causes = [*_causes(error)]
    # an exit because of an exception tells no more than that exception's place
    blamed = causes[0] if causes and isinstance(error, SystemExit) else error
    return Raised(
        error=describe_error(error),
        causes=tuple(describe_error(cause) for cause in causes),
        where=raise_site(blamed.__traceback__) if blamed is not error or not at else at,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    for _ in range(_MOST_CAUSES):
        cause = error.__cause__
        if cause is None and not error.__suppress_context__:
            cause = error.__context__
        if cause is None or id(cause) in seen:
            return
        seen.add(id(cause))
        yield cause
        error = cause


# ---- sys.exit ------------------------------------------------------------------------------------

_exiting: Raised | None = None
"""The exit that ends the main program, once it is past every line of the program."""
_exit = sys.exit


class _Mark:
    """Lives as long as the traceback of one SystemExit. The interpreter takes a SystemExit before
    `atexit`. Where the program catches one, its traceback goes while a line of Python runs; where
    nobody does, it goes when none is left."""

    __slots__ = ("_raised",)

    def __init__(self, raised: Raised) -> None:
        self._raised = raised

    def __del__(self) -> None:
        global _exiting
        try:
            sys._getframe(1)
        except ValueError:  # no line of Python called this
            _exiting = self._raised


def _noting_exit(*status: object) -> NoReturn:
    try:
        _exit(*status)  # type: ignore[arg-type]  # as the program gave it
    except SystemExit as error:
        marks: list[_Mark] = []  # a local of the traceback's frame
        attempt(_mark, error, marks)
        raise


def _mark(error: SystemExit, marks: list[_Mark]) -> None:
    if error.code not in _UNREMARKABLE and threading.current_thread() is _MAIN:
        marks.append(_Mark(_raised_of(error, call_site())))


_MAIN = threading.main_thread()


def note_exits() -> None:
    """Have `sys.exit` note the exit code it is called with."""
    global _exit
    if sys.exit is not _noting_exit:
        _exit, sys.exit = sys.exit, _noting_exit


def forget_exits() -> None:
    """Give `sys.exit` back, unless somebody else stands there now."""
    if sys.exit is _noting_exit:
        sys.exit = _exit
