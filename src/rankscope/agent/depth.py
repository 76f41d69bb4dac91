"""Whether a model's nesting leaves room for hooks on Python's stack.

A module call takes one frame more while any hook is on (torch's own `inner`), so a model may run
untraced and end in a RecursionError traced. That must not happen: such a model is not traced.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["has_room_for"]

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
