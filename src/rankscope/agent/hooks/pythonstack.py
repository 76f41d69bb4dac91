"""What Python's own stack tells: the keywords of a call, who made it, how much room is left.

A module call takes one frame more while any hook is on (torch's own `inner`), so a model may run
untraced and end in a RecursionError traced. That must not happen: such a model is not traced.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType, TracebackType

import torch

import rankscope
from rankscope.capture.torch_internals.parallel import shape_inference

_INSIDE = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, rankscope))
_known_files: dict[str, bool] = {}
"""By file name: a program has few of them."""
_MOST_FRAMES = 64


def call_site() -> str:
    """Return `file.py:12 function`, without folders; "" where no line of the program is near (the
    thread on which backward runs)."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return ""
        code = frame.f_code
        name = code.co_filename
        if not _is_inside(name):
            return f"{os.path.basename(name)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return ""


def program_lines() -> int:
    """Return a number for the lines of the program that are running, those of its libraries among
    them: calls made from the same place of the program, a loop, have the same."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[tuple[str, int]] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        name = frame.f_code.co_filename
        if not _is_inside(name):
            lines.append((name, frame.f_lineno))
        frame = frame.f_back
    return hash(tuple(lines))


def _is_inside(name: str) -> bool:
    """True for a file of torch or rankscope, and for code without a file."""
    found = _known_files.get(name)
    if found is None:
        found = _known_files[name] = name.startswith((*_INSIDE, "<"))
    return found


def has_left(error: BaseException, module: torch.nn.Module) -> bool:
    """True where an exception came out of a call of this module, hooks and all."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        is_call = frame.f_code.co_filename.endswith("module.py") and (
            frame.f_code.co_name == "_call_impl"
        )
        if is_call and frame.f_locals.get("self") is module:
            return True
        trace = trace.tb_next
    return False


def raise_site(trace: TracebackType | None) -> str:
    """Return `file.py:12 function` of the innermost line of the program that an exception left.

    Lines of installed packages and of the standard library count where there are no others.
    """
    own = installed = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        name = code.co_filename
        if not name.startswith((*_INSIDE, "<")):
            line = f"{os.path.basename(name)}:{trace.tb_lineno} {code.co_name}"
            if name.startswith(_INSTALLED):
                installed = line
            else:
                own = line
        trace = trace.tb_next
    return own or installed


_INSTALLED = tuple(
    folder + os.sep
    for folder in {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")}
    if folder
)


_PER_CALL = 5
"""Levels that one nested call with hooks takes: `__call__` from C, three frames of torch's and
`forward`."""
_FOR_HOOKS = 60
"""Levels for our own work below the innermost call, with some to spare for the user's."""


def has_room_for(depth: int) -> bool:
    """True where module calls `depth` deep, hooks and all, fit on the stack from here."""
    left = sys.getrecursionlimit() - depth * _PER_CALL - _FOR_HOOKS
    if left > 500:  # ordinary models: not worth counting frames
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and left >= 0:
        left -= 1
        frame = frame.f_back
    return left >= 0


def explain_no_room(class_name: str, depth: int) -> str:
    """Return what a user is told of a model for which there is none."""
    return (
        f"{class_name} nests {depth} modules deep: with hooks on, Python's recursion limit "
        f"({sys.getrecursionlimit()}) leaves no room for it; tracing is switched off. "
        "Raise it with sys.setrecursionlimit to trace this model"
    )


def keyword_arguments() -> dict[str, object] | None:
    """Return the kwargs of the module call whose global pre-hook is running, None where they are
    hidden.

    Global pre-hooks are handed no kwargs; they stand in the frame of torch's `Module._call_impl`.
    """
    frame = sys._getframe(1)
    for _ in range(6):
        if frame.f_code.co_name == "inner" and frame.f_code.co_filename.endswith("module.py"):
            found = frame.f_locals.get("kwargs")
            return found if isinstance(found, dict) else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def module_calls_running() -> int:
    """Return how many module calls with hooks are on this thread's Python stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        count += code.co_name == "inner" and code.co_filename.endswith("module.py")
        frame = frame.f_back
    return count


def is_inferring_shapes() -> bool:
    """True where a pipeline stage runs its module on empty memory, only to learn shapes."""
    inferring = shape_inference()
    frame: FrameType | None = sys._getframe(1) if inferring else None
    while frame is not None:
        if frame.f_code in inferring:
            return True
        frame = frame.f_back
    return False
