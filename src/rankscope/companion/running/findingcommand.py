"""The command of `--rs-on-finding`: given each new finding, one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rankscope.record.timetext import utc_text
from rankscope.run.filenames import FINDINGS_FORMAT
from rankscope.run.outfolder import typed

__all__ = ["FindingCommand"]

_COMMAND: Final = "--rs-on-finding: the command"
_COMMAND_S: Final = 60.0
_MOST_WAITING: Final = 16
_VARIABLE: Final = "RANKSCOPE_ON_FINDING"
_SHELL: Final = f'eval "unset {_VARIABLE}\n${_VARIABLE}"'
"""Runs the command from a variable: everybody may read the shell's command line."""
_AFTER: Final = (
    f"n=0; while kill -0 $1 && [ $n -lt {_COMMAND_S:.0f} ]; do sleep 1; n=$((n+1)); done 2>&-; "
    'kill -9 -$1 2>&-; shift; [ "$1" ] || exit 0; '
)
"""Waits for the end of a command, and ends it with its children when its time is over."""


class FindingCommand:
    """Hands each new finding to a command of the user's, one at a time."""

    def __init__(self, command: str, folder: Path, say: Callable[[str], object]) -> None:
        """Start nothing yet.

        Args:
            command: for the shell; "" for none.
            folder: the trace folder, where it works.
            say: told what goes wrong.
        """
        self._command, self._folder, self._say = command, folder, say
        self._waiting: deque[str] = deque()
        self._more = 0
        """Findings behind those that wait, which are told in one line."""
        self._running: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def add(self, lines: Sequence[str]) -> None:
        """Have the command told of findings: of many at once the first, and how many more."""
        for line in lines if self._command else ():
            if self._more or len(self._waiting) >= _MOST_WAITING:
                self._more += 1
            else:
                self._waiting.append(line)

    def look(self) -> None:
        """Start the command for the next finding once the one before is done."""
        if self._is_busy():
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        elif self._more:
            self._start(self._summary())
            self._more = 0

    def close(self) -> None:
        """Have what waits handed over as one line, behind the command that runs: this process ends,
        and a shell goes on that sees to both."""
        is_single = len(self._waiting) == 1 and not self._more
        if not is_single:
            self._more += len(self._waiting)
        line = self._waiting[0] if is_single else self._summary() if self._more else ""
        if self._is_busy() and self._running is not None:
            self._start(line, _AFTER, str(self._running.pid), "more" if line else "")
        elif line:
            self._start(line)

    def _is_busy(self) -> bool:
        if self._running is None:
            return False
        code = self._running.poll()
        if code is None and time.monotonic() - self._began <= _COMMAND_S:
            return True
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)  # with whatever it has started
            self._running.wait()
            self._say(f"{_COMMAND} was ended after {_COMMAND_S:.0f} s")
        elif code:
            self._say(f"{_COMMAND} ended with {code}")
        self._running = None
        return False

    def _summary(self) -> str:
        text = f"{self._more} more findings: {typed('check', self._folder)}"
        fields = {"found": utc_text(time.time_ns()), "text": text, "more": self._more}
        return json.dumps({"format": FINDINGS_FORMAT, **fields})

    def _start(self, line: str, before: str = "", *words: str) -> None:
        with tempfile.TemporaryFile() as given:
            given.write(f"{line}\n".encode())
            given.seek(0)
            try:
                self._running = subprocess.Popen(
                    ["/bin/sh", "-c", before + _SHELL, "sh", *words],
                    stdin=given,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, _VARIABLE: self._command},
                    cwd=self._folder,
                    start_new_session=True,
                )
            except OSError as error:
                self._say(f"{_COMMAND} cannot be started: {error.strerror}")
        self._began = time.monotonic()
