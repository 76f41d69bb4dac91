"""The process that goes with a running job step by step: started, started again, ended by the
collector.

It comes once records have been there for some seconds, so that a job that is over quickly has none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rankscope.gather.log import log
from rankscope.run.companions import ON_FINDING_VARIABLE, companion_environment
from rankscope.spool.replication import replicated

__all__ = ["StepwiseProcess"]

_AFTER_S: Final = 3.0
_STARTS: Final = 3
_LONG_S: Final = 600.0
"""One that lived so long may be started as often again."""
_END_S: Final = 0.5
"""Whatever a kill leaves unwritten is made from the records when the tree is built."""


class StepwiseProcess:
    """The process of one collector; nothing of a run depends on it."""

    def __init__(
        self, command: Sequence[str], out: Path, *, from_bytes: int, on_finding: str = ""
    ) -> None:
        """Start nothing yet.

        Args:
            command: starts it, as of `stepwise_command`.
            out: the trace folder.
            from_bytes: of records before which there is nothing to do.
            on_finding: shell command given each finding, "" for none.
        """
        self._environment = {**companion_environment(), ON_FINDING_VARIABLE: on_finding}
        self._command, self._out, self._from_bytes = command, out, from_bytes
        self._starts_left = _STARTS
        self._process: subprocess.Popen[bytes] | None = None
        self._first_at: float | None = None
        self._look_at = 0.0
        self._started_at = 0.0

    def tend(self) -> None:
        """Start it, or start it again where it was killed; called while records come."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        if now - self._first_at < _AFTER_S or now < self._look_at:
            return
        if self._from_bytes:
            self._look_at = now + _AFTER_S
            if sum(replicated(self._out).values()) < self._from_bytes:
                return
            self._from_bytes = 0
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            log(f"the process beside the job's steps ended with {code}")
            self._process = None
            if now - self._started_at > _LONG_S:
                self._starts_left = _STARTS
        if not self._starts_left:
            return
        self._starts_left -= 1
        self._started_at = now
        try:
            self._process = subprocess.Popen(
                [*self._command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # its errors go into the collector's log
                env=self._environment,
                cwd=self._out,
                start_new_session=True,
            )
        except OSError as error:
            log(f"the process beside the job's steps cannot be started: {error.strerror}")

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
