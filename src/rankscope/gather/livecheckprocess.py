"""The process that judges steps while a job runs: started, started again, ended by the collector.

It comes once records have been there for some seconds, so that a job that is over quickly has none.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import Final

from rankscope.gather.log import log
from rankscope.run.companions import companion_environment, live_check_command

__all__ = ["LiveCheckProcess"]

_AFTER_S: Final = 3.0
_STARTS: Final = 3
_END_S: Final = 2.0


class LiveCheckProcess:
    """The process of one collector; nothing of a run depends on it."""

    def __init__(self, out: Path, *, traced_ranks: int, on_finding: str) -> None:
        """Start nothing yet; arguments as of `live_check_command`."""
        self._command = live_check_command(out, traced_ranks=traced_ranks, on_finding=on_finding)
        self._folder = out
        self._starts_left = _STARTS
        self._process: subprocess.Popen[bytes] | None = None
        self._first_at: float | None = None

    def tend(self) -> None:
        """Start it, or start it again where it was killed; called while records come."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        if now - self._first_at < _AFTER_S:
            return
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            log(f"the live check ended with {code}")
            self._process = None
        if not self._starts_left:
            return
        self._starts_left -= 1
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # its errors go into the collector's log
                env=companion_environment(),
                cwd=self._folder,
                start_new_session=True,
            )
        except OSError as error:
            log(f"the live check cannot be started: {error.strerror}")

    def close(self) -> None:
        """End it: the job is over, and the tree is about to be built."""
        self._starts_left = 0
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
        process.kill()
        process.wait()
