"""What Python's own stack tells: the keywords of a call, who made it, how much room is left.

A module call takes one frame more while any hook is on (torch's own `inner`), so a model may run
untraced and end in a RecursionError traced. That must not happen: such a model is not traced.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from traceback import walk_tb
from types import FrameType, TracebackType

import torch

import rankscope
from rankscope.capture.torch_internals.parallel import shape_inference

_INSIDE = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, rankscope))
_MOST_FRAMES = 64


def frames_here() -> Iterator[FrameType]:
    """Yield the frames of this thread's Python stack, the innermost first: that of whoever asks."""
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
    """Return `file.py:12 function` of the innermost line that an exception left, if possible of the
    program."""
    own = installed = ""
    for frame, number in walk_tb(trace):
        name = frame.f_code.co_filename
        if _is_inside(name):
            continue
        line = f"{os.path.basename(name)}:{number} {frame.f_code.co_name}"
        if name.startswith(_INSTALLED):
            installed = line
        else:
            own = line
    return own or installed


_INSTALLED = tuple(
    folder + os.sep
    for folder in {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")}
    if folder
)


_PER_CALL = 5
"""Levels of one nested call with hooks: `__call__` from C, three of torch's and `forward`."""
_FOR_HOOKS = 60
"""Levels for our own work below the innermost call, with some to spare for the user's."""


def has_room_for(depth: int) -> bool:
    """True where module calls `depth` deep, hooks and all, fit on the stack from here."""
    left = sys.getrecursionlimit() - depth * _PER_CALL - _FOR_HOOKS
    if left > 500:  # ordinary models: not worth counting frames
        return True
    return sum(1 for _ in frames_here()) <= left


def keyword_arguments() -> dict[str, object] | None:
    """Return the kwargs of the module call whose global pre-hook is running, None if hidden. Global
    pre-hooks are handed no kwargs; they stand in the frame of torch's `Module._call_impl`."""
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
    return calls_running("inner", "module.py")


def is_inferring_shapes() -> bool:
    """True where a pipeline stage runs its module on empty memory, only to learn shapes."""
    inferring = shape_inference()
    return bool(inferring) and any(frame.f_code in inferring for frame in frames_here())
