"""Verdicts on a job while it runs, made beside whoever shows them: nobody waits for one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rankscope.run.companions import companion_environment
from rankscope.run.findingnotices import findings_in

__all__ = ["NO_VERDICT", "VerdictAsker"]

NO_VERDICT: Final[dict[str, Any]] = {"verdict": None, "age_s": None, "trouble": "", "findings": []}
"""The answer where there is none."""
_VERDICT_S: Final = 600.0
_MOST_JUDGED_BYTES: Final = 256 << 20
"""Records; every step of them is judged for each answer. Of more the live check tells."""
_NICE: Final = 10


class VerdictAsker:
    """Asks `rankscope check --json` again and again, in a process of its own at low priority."""

    def __init__(
        self,
        folder: Path,
        *,
        layout: Path | None = None,
        least_wait_s: float = 5.0,
        share: int = 4,
    ) -> None:
        """Ask nothing yet.

        Args:
            folder: the trace folder.
            layout: declared layouts.
            least_wait_s: between an answer and the next question.
            share: answering may take this part of the time: 4 for a fourth.
        """
        self._least_wait_s, self._share = least_wait_s, share
        self._folder = folder
        self._words = [sys.executable, "-m", "rankscope", "check", str(folder), "--json"]
        if layout is not None:
            self._words += ["--layout", str(layout)]
        self._asked: subprocess.Popen[bytes] | None = None
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this object
        self._began = self._next = 0.0
        self._judged_at = 0.0
        self._report: dict[str, Any] = {}
        self._trouble = ""

    def look(self, received_bytes: int) -> None:
        """Take an answer that has come, and ask again once that is due."""
        if self._asked is not None:
            if self._asked.poll() is not None:
                self._take()
            elif time.monotonic() - self._began > _VERDICT_S:
                self._give_up()
            return
        if time.monotonic() < self._next or not received_bytes:
            return
        if received_bytes > _MOST_JUDGED_BYTES:
            self._trouble = (
                f"not judged as a whole: {received_bytes / 1e9:.1f} GB of records; rankscope check "
                "judges them"
            )
            told = [{**each, "origin": True} for each in findings_in(self._folder)]
            if told:
                self._report = {"verdict": "fault", "findings": told}
                self._judged_at = time.monotonic()
            return
        self._out.seek(0)
        self._out.truncate()
        self._began = time.monotonic()
        self._asked = subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.DEVNULL,
            env=companion_environment(),
            start_new_session=True,  # Ctrl-C is for the screen
        )
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._asked.pid, _NICE)

    def wait(self, received_bytes: int) -> None:
        """Ask, and wait for the answer."""
        self.look(received_bytes)
        if self._asked is None:
            return
        try:
            self._asked.wait(_VERDICT_S)
        except subprocess.TimeoutExpired:
            self._give_up()
            return
        self._take()

    def _give_up(self) -> None:
        self.close()
        self._trouble = f"rankscope check gave no answer in {_VERDICT_S:.0f} s"
        self._next = time.monotonic() + self._share * _VERDICT_S

    def answer(self) -> dict[str, Any]:
        """Return the last report, with `age_s` since it was begun and `trouble`."""
        if not self._report:
            return {**NO_VERDICT, "trouble": self._trouble}
        age_s = time.monotonic() - self._judged_at
        return {**self._report, "age_s": age_s, "trouble": self._trouble}

    def close(self) -> None:
        """End a check that is at work."""
        if self._asked is not None:
            self._asked.kill()
            self._asked.wait()
            self._asked = None

    def _take(self) -> None:
        self._asked = None
        took = time.monotonic() - self._began
        self._next = time.monotonic() + max(self._least_wait_s, (self._share - 1) * took)
        self._out.seek(0)
        try:
            report = json.loads(self._out.read())
        except ValueError:
            self._trouble = "rankscope check gave no answer"
            return
        if "error" in report:
            self._trouble = str(report["error"])
            return
        self._report, self._trouble, self._judged_at = report, "", self._began
