"""How far a piece of work is, on one line of a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_FIRST_S = 1.0
"""Nothing is said about work that is done sooner."""
_EVERY_S = 0.2


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float | None], None]]:
    """Give a function that shows progress on stderr, where that is a terminal, from the first
    second on: what is being done, and which part of it is. The line is gone when the work is done.
    """
    begin = shown = time.monotonic()
    width = 0

    def write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # of a terminal that was closed
            if sys.stderr is not None and sys.stderr.isatty():
                sys.stderr.write(text)
                sys.stderr.flush()

    def say(what: str, part: float | None) -> None:
        nonlocal shown, width
        now = time.monotonic()
        if now - begin >= _FIRST_S and now - shown >= _EVERY_S:
            done = "" if part is None else f" {part:4.0%}"
            line = f"rankscope: {what}{done} ({now - begin:.0f} s)"
            write("\r" + line.ljust(width))
            shown, width = now, len(line)

    try:
        yield say
    finally:
        if width:
            write("\r" + " " * width + "\r")
