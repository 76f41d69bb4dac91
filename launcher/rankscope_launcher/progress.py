"""What the launcher says on stderr: single lines, a line that counts seconds on a terminal, and
that a job stands still.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType

from rankscope.run.outfolder import typed
from rankscope.run.stallrecords import stalls_in

__all__ = ["Progress", "StallNotices", "say"]

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


class StallNotices:
    """Repeats on stderr what this host's relay has noted of stalls, each thing once."""

    def __init__(self, run_folder: Path, shown: str) -> None:
        """Say nothing yet.

        Args:
            run_folder: where the relay notes it.
            shown: the trace folder as it may be typed here.
        """
        self._run_folder = run_folder
        self._shown = shown
        self._said: set[tuple[int, bool]] = set()

    def look(self) -> None:
        """Say what is new. The end of a job is no news here: the last line is about that."""
        for stall in stalls_in(self._run_folder):
            key = stall.noticed_ns, bool(stall.over_ns)
            if key in self._said:
                continue
            self._said.add(key)
            if not stall.over_ns:
                say(f"{stall.sentence(time.time_ns())}; ask why: {typed('check', self._shown)}")
            elif not stall.is_by_end:
                say(stall.sentence(time.time_ns()))
