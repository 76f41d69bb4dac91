"""The command of `--rs-on-finding`: given each new finding, one at a time."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["FindingCommand"]

_COMMAND_S: Final = 60.0
_MOST_WAITING: Final = 16


class FindingCommand:
    """Hands each new finding to a command of the user's, one at a time."""

    def __init__(self, command: str, folder: Path) -> None:
        """Start nothing yet.

        Args:
            command: for the shell; "" for none.
            folder: where it works.
        """
        self._command, self._folder = command, folder
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._running: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def add(self, lines: Sequence[str]) -> None:
        """Have the command told of findings; of too many the latest."""
        if self._command:
            self._waiting.extend(lines)

    def look(self) -> str:
        """Start the command for the next finding once the one before is done; return what went
        wrong, "" for nothing."""
        trouble = ""
        if self._running is not None:
            code = self._running.poll()
            if code is None and time.monotonic() - self._began > _COMMAND_S:
                self._running.kill()
                self._running.wait()
                code, trouble = None, f"was ended after {_COMMAND_S:.0f} s"
            elif code is None:
                return ""
            elif code:
                trouble = f"ended with {code}"
            self._running = None
        if self._waiting:
            trouble = self._start(self._waiting.popleft()) or trouble
        return trouble and f"--rs-on-finding: the command {trouble}"

    def _start(self, line: str) -> str:
        with tempfile.TemporaryFile() as given:
            given.write(f"{line}\n".encode())
            given.seek(0)
            try:
                self._running = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=given,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=self._folder,
                    start_new_session=True,
                )
            except OSError as error:
                return f"cannot be started: {error.strerror}"
        self._began = time.monotonic()
        return ""
