"""What the launcher says of a job that stands still: one line, and one when it goes on."""

from __future__ import annotations

import time
from pathlib import Path

from rankscope.run.out import typed
from rankscope.run.stalls import standstills_in
from rankscope_launcher.progress import say

__all__ = ["SaidOfStandstills"]


class SaidOfStandstills:
    """Repeats on stderr what this host's relay has noted, each thing once."""

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
        for each in standstills_in(self._run_folder):
            key = each.noticed_ns, bool(each.over_ns)
            if key in self._said:
                continue
            self._said.add(key)
            if not each.over_ns:
                say(f"{each.told(time.time_ns())}; ask why: {typed('check', self._shown)}")
            elif not each.is_by_end:
                say(each.told(time.time_ns()))
