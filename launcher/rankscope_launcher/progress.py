"""What the launcher says on stderr: single lines, and that a job stands still."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from rankscope.run.outfolder import typed
from rankscope.run.stallrecords import stalls_in

__all__ = ["StallNotices", "say"]


def say(line: str) -> None:
    """Print one line on stderr; where stderr is closed or gone the line is dropped."""
    if sys.stderr is None:  # closed before the process began
        return
    with contextlib.suppress(OSError, ValueError):  # of a terminal that was closed
        sys.stderr.write(f"rankscope: {line}\n")
        sys.stderr.flush()


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
