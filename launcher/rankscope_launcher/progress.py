"""What the launcher says: single lines on stderr, and a line that counts seconds on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType

__all__ = ["Progress", "say"]

_SHOW_AFTER_S = 1.0


def say(line: str) -> None:
    """Print one line on stderr; where stderr is closed or gone the line is dropped."""
    _write(f"rankscope: {line}\n")


def _write(text: str) -> None:
    if sys.stderr is None:  # closed before the process began
        return
    with contextlib.suppress(OSError, ValueError):  # of a terminal that was closed
        sys.stderr.write(text)
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
            _write(f"\rrankscope: {self._what} … {self._shown} s")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown >= 0:
            _write("\r\x1b[K")
