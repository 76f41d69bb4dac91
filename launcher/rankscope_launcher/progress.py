"""What the launcher says: single lines on stderr, and a line that counts seconds on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType

__all__ = ["Progress", "say"]

_SHOW_AFTER_S = 1.0


def say(line: str) -> None:
    """Print one line on stderr; a stderr that is gone is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"rankscope: {line}\n")
        sys.stderr.flush()


class Progress:
    """A line on the terminal, from the second second on, gone when the work is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._shown = -1
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def tick(self) -> None:
        """Show the seconds gone, where anybody can see them."""
        seconds = time.monotonic() - self._begin
        if self._is_terminal and seconds >= _SHOW_AFTER_S and int(seconds) != self._shown:
            self._shown = int(seconds)
            sys.stderr.write(f"\rrankscope: {self._what} … {self._shown} s")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown >= 0:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
