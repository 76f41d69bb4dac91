"""The process that goes with a running job step by step: started, started again, ended by the
collector.

It comes once records have been there for some seconds, so that a job that is over quickly has none.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import Final

from rankscope.companion.log import log
from rankscope.run.processes import ChildWatch, reader_command, start_child

__all__ = ["ReaderProcess"]

_AFTER_S: Final = 3.0
_STARTS: Final = 3
_LONG_S: Final = 600.0
"""One that lived so long may be started as often again."""
_END_S: Final = 0.5
"""Whatever a kill leaves unwritten is made from the records when the tree is built."""


class ReaderProcess:
    """The process of one collector; nothing of a run depends on it."""

    def __init__(self, run_folder: Path, out: Path) -> None:
        """Start nothing yet."""
        self._command, self._out = reader_command(run_folder), out
        self._starts_left = _STARTS
        self._child: ChildWatch | None = None
        self._first_at: float | None = None
        self._started_at = 0.0

    def tend(self) -> None:
        """Start it, or start it again where it was killed; called while records come."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        if now - self._first_at < _AFTER_S:
            return
        if self._child is not None:
            code = self._child.poll()
            if code is None:
                return
            log(f"the process beside the job's steps ended with {code}")
            self._child = None
            if now - self._started_at > _LONG_S:
                self._starts_left = _STARTS
        if not self._starts_left:
            return
        self._starts_left -= 1
        self._started_at = now
        try:
            self._child = ChildWatch(start_child(self._command, self._out))
        except OSError as error:
            log(f"the process beside the job's steps cannot be started: {error.strerror}")

    def close(self) -> None:
        """End it: the job is over, and the tree is about to be built."""
        self._starts_left = 0
        if self._child is None:
            return
        process, self._child = self._child.process, None
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
        process.kill()
        process.wait()
