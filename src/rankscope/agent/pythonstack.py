"""What Python's own stack tells: the keywords of a call, who made it, how much room is left, and by
which exception or exit code, at which of its lines, a program ends.

A module call takes one frame more while any hook is on (torch's own `inner`), so a model may run
untraced and end in a RecursionError traced. That must not happen: such a model is not traced.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import NoReturn

import torch

import rankscope
from rankscope.agent.guard import attempt, describe_error
from rankscope.capture.torch_internals.distributed import shape_inference

_INSIDE = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, rankscope))
_MOST_FRAMES = 64


def frames_here() -> Iterator[FrameType]:
    """Yield the frames of this thread's Python stack, the caller's own first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def calls_running(function: str, file: str) -> int:
    """Return how many calls of a function, in a file with a name that ends so, are on the stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # no generator: asked twice in every step, traced or not
        code = frame.f_code
        count += code.co_name == function and code.co_filename.endswith(file)
        frame = frame.f_back
    return count


def call_site() -> str:
    """Return `file.py:12 function`; "" without a line of the program (backward's thread)."""
    for frame in islice(frames_here(), _MOST_FRAMES):
        code = frame.f_code
        if not _is_inside(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
    return ""


def program_lines() -> int:
    """Return a hash of the running lines of the program and its libraries: a loop's are equal."""
    lines = (
        (frame.f_code.co_filename, frame.f_lineno)
        for frame in frames_here()
        if not _is_inside(frame.f_code.co_filename)
    )
    return hash(tuple(islice(lines, _MOST_FRAMES)))


@functools.cache
def _is_inside(name: str) -> bool:
    """True for a file of torch or rankscope, and for code without a file."""
    return name.startswith((*_INSIDE, "<"))


def has_left(error: BaseException, module: torch.nn.Module) -> bool:
    """True where an exception came out of a call of this module, hooks and all."""
    return any(
        frame.f_code.co_name == "_call_impl"
        and frame.f_code.co_filename.endswith("module.py")
        and frame.f_locals.get("self") is module
        for frame, _ in walk_tb(error.__traceback__)
    )


def raise_site(trace: TracebackType | None) -> str:
    """Return `file.py:12 function` of the innermost line, if possible of the program."""
    program_line = installed = ""
    for frame, number in walk_tb(trace):
        name = frame.f_code.co_filename
        if _is_inside(name):
            continue
        line = f"{os.path.basename(name)}:{number} {frame.f_code.co_name}"
        if name.startswith(_INSTALLED):
            installed = line
        else:
            program_line = line
    return program_line or installed


_INSTALLED = tuple(
    folder + os.sep
    for folder in {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")}
    if folder
)


_PER_CALL = 5
"""Levels of one nested call with hooks: `__call__` from C, three of torch's and `forward`."""
_FOR_HOOKS = 60
"""Levels for our own work below the innermost call, and some more for the user's hooks."""


def has_room_for(depth: int) -> bool:
    """True where module calls `depth` deep, hooks and all, fit on the stack from here."""
    room = sys.getrecursionlimit() - depth * _PER_CALL - _FOR_HOOKS
    if room > 500:  # ordinary models: not worth counting frames
        return True
    return sum(1 for _ in frames_here()) <= room


def keyword_arguments() -> dict[str, object] | None:
    """Return the kwargs of the module call whose global pre-hook is running, None if hidden. Global
    pre-hooks are handed no kwargs; they stand in the frame of torch's `Module._call_impl`."""
    frame = sys._getframe(1)
    # a bounded look: in another torch the frame may have another name
    for _ in range(6):
        if frame.f_code.co_name == "inner" and frame.f_code.co_filename.endswith("module.py"):
            keywords = frame.f_locals.get("kwargs")
            return keywords if isinstance(keywords, dict) else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def module_calls_running() -> int:
    """Return how many module calls with hooks are on this thread's Python stack."""
    return calls_running("inner", "module.py")


def is_setting_up() -> bool:
    """True where a module is run to make a model, in no step of a training: by a pipeline stage, on
    empty memory, to learn shapes; by the constructor of another one, to count what it gives, or to
    see what a parametrization makes of a weight."""
    inferring = shape_inference()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # no generator: asked at every outermost call, traced or not
        code = frame.f_code
        if code.co_name == "__init__":
            if issubclass(type(frame.f_locals.get("self")), torch.nn.Module):
                return True
        elif inferring and code in inferring:
            return True
        frame = frame.f_back
    return False


_MOST_CAUSES = 8
_UNREMARKABLE = (None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The exception that ends a program, in words: the exception itself would keep tensors."""

    error: str
    causes: tuple[str, ...]
    """Texts of the exceptions that led to this one, the nearest first."""
    where: str
    """`file.py:12 function` of the program's innermost line, "" without one."""


def what_ends_the_program() -> Raised | None:
    """Return the uncaught exception, or the nonzero exit code, that ends this process. The
    interpreter notes an exception before it runs `atexit`, but no SystemExit; a process of
    `multiprocessing` ends while handling either."""
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
    visited = {id(error)}
    for _ in range(_MOST_CAUSES):
        cause = error.__cause__
        if cause is None and not error.__suppress_context__:
            cause = error.__context__
        if cause is None or id(cause) in visited:
            return
        visited.add(id(cause))
        yield cause
        error = cause


# ---- sys.exit ------------------------------------------------------------------------------------

_exiting: Raised | None = None
"""The exit that ends the main program, once it is past every line of the program."""
_exit = sys.exit


class _Mark:
    """Lives as long as the traceback of one SystemExit. The interpreter clears a SystemExit before
    `atexit`. If the program catches it, the traceback dies while a line of Python runs; if not,
    when no line is left."""

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
        # referred to by this frame alone, which the traceback keeps: it dies when the SystemExit
        # does
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
    """Restore `sys.exit`, unless other code has replaced it since."""
    if sys.exit is _noting_exit:
        sys.exit = _exit
