"""The launcher's child process, the companion of its host: one that is killed is started again.

It keeps no state but the files it works on, so one that was killed goes on where it was. That
happens a few times, then the launcher leaves it be and says at the end what to do.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rankscope.run.files import open_own_log
from rankscope.run.processes import ExitOutcome, companion_environment

__all__ = ["Companion"]

_STARTS_AGAIN = 5
_LOOK_S = 0.5
_FINAL = tuple(ExitOutcome)


class Companion:
    """One child process, in a session of its own: Ctrl-C in the terminal ends the job alone.

    A thread looks after it while the launcher's main thread is inside torchrun.
    """

    def __init__(
        self, command: Sequence[str], log: Path, folder: Path, look: Callable[[], object]
    ) -> None:
        """Start it.

        Args:
            command: what to run.
            log: takes its output.
            folder: where it works; `-m` puts it on the module path, so only this user writes there.
            look: called again and again: what else is to be seen while the job runs.

        Raises:
            OSError: it cannot be started.
        """
        self._command = list(command)
        self._log = log
        self._folder = folder
        self._starts_left = _STARTS_AGAIN
        self._process = self._start()
        self._look = look
        self._is_job_over = threading.Event()
        self._thread = threading.Thread(
            target=self._look_after, name="rankscope-companion", daemon=True
        )
        self._thread.start()

    def leave_to_caller(self) -> None:
        """End the thread; from then on whoever asked tends it."""
        self._is_job_over.set()
        self._thread.join()

    def _look_after(self) -> None:
        while not self._is_job_over.wait(_LOOK_S):
            self.tend()
            self._look()

    def outcome(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._process.poll()

    def tend(self) -> None:
        """Start it again where it was killed, or failed in a way it has no code for."""
        if self.outcome() in (None, *_FINAL) or not self._starts_left:
            return
        self._starts_left -= 1
        try:
            self._process = self._start()
        except OSError:
            self._starts_left = 0

    def is_at_work(self) -> bool:
        """True while it runs, or would be started again."""
        code = self.outcome()
        return code is None or (code not in _FINAL and self._starts_left > 0)

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False where it has not."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Ask it to end."""
        self._starts_left = 0
        self._process.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = open_own_log(self._log)
        try:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=companion_environment(),
                cwd=self._folder,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
