"""Which line of the program is running, or raised: the innermost one that is neither torch's nor
ours."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType, TracebackType

import torch

import rankscope

__all__ = ["call_site", "raise_site"]

_INSIDE = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, rankscope))
_is_inside: dict[str, bool] = {}
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
        inside = _is_inside.get(name)
        if inside is None:
            inside = _is_inside[name] = name.startswith(_INSIDE) or name.startswith("<")
        if not inside:
            return f"{os.path.basename(name)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return ""


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
