"""Which steps of a running job are judged, and when; what is found is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError
from rankscope.livecheck.findingcommand import FindingCommand
from rankscope.livecheck.findingsfile import FindingsFile
from rankscope.livecheck.finishedsteps import RunningJob
from rankscope.livecheck.stepsplit import StepKey
from rankscope.record.finding import Finding, Severity
from rankscope.run.stallrecords import stalls_in

__all__ = ["LiveCheck"]

_LOOK_S: Final = 0.25
_REST: Final = 3
"""It rests so many times as long as it worked: several steps together cost less than one by one."""
_MOST_REST_S: Final = 2.0
_STEPS_BESIDE: Final = 2
"""Steps before the new ones that are judged with them: some rules look back."""
_MOST_BYTES: Final = 192 << 20
"""Of records held at a time."""
_LOOK_BYTES: Final = 24 << 20
"""Of records judged at a time, where that is more than one step."""


class LiveCheck:
    """One job, judged step by step."""

    def __init__(self, out: Path, *, traced_ranks: int, command: str = "") -> None:
        """Judge nothing yet.

        Args:
            out: the trace folder.
            traced_ranks: how many ranks write a stream.
            command: given each new finding, "" for none.
        """
        self._out = out
        self._job = RunningJob(out, traced_ranks=traced_ranks)
        self._findings = FindingsFile(out)
        self._command = FindingCommand(command, out)
        self._judged: list[StepKey] = []
        """The latest, in order."""
        self._stall_ns = 0
        self._notices: set[str] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """End with this look."""
        self._is_stopped = True

    def run(self) -> None:
        """Look until stopped, or until whoever started it has gone."""
        parent = os.getppid()
        while not self._is_stopped and os.getppid() == parent:
            began = time.monotonic()
            is_busy = self.look()
            took = time.monotonic() - began
            until = began + took + max(0.0 if is_busy else _LOOK_S, min(_REST * took, _MOST_REST_S))
            while not self._is_stopped and time.monotonic() < until:
                time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))

    def look(self) -> bool:
        """Read what is new and judge the steps that are over; True where more waits."""
        life = self._job.life
        is_busy = self._job.read(lambda: self._is_stopped) > 0
        if self._job.life != life:
            self._judged = []
        for rank, trouble in self._job.trouble.items():
            self._say(f"the records of rank {rank} are not judged while the job runs: {trouble}")
        new = self._newest([key for key in self._job.finished() if key not in self._judged])
        if new:
            every = [*self._judged, *new]
            self._judge(every)
            self._job.drop(every[:-_STEPS_BESIDE])
            self._judged = every[-_STEPS_BESIDE:]
        self._judge_a_stall()
        self._make_room()
        trouble = self._command.look()
        if trouble:
            self._say(trouble)
        return is_busy

    def _newest(self, keys: list[StepKey]) -> list[StepKey]:
        """Return the steps to be judged now, so many as are worth one look: where steps come faster
        than they can be judged, older ones are let go."""
        part: list[StepKey] = []
        size = 0
        for key in reversed(keys):
            size += self._job.bytes_of(key)
            if part and size > _LOOK_BYTES:
                break
            part.append(key)
        passed_over = keys[: len(keys) - len(part)]
        if passed_over:
            self._say(
                "steps come faster than they can be judged while the job runs: of those that wait "
                "the newest are; rankscope check judges all"
            )
            self._job.drop(passed_over)
        return part[::-1]

    def _judge(self, keys: Iterable[StepKey]) -> None:
        keys = list(keys)
        try:
            report = check(self._job.trace(keys))
        except RankscopeError as error:
            self._say(f"steps cannot be judged while the job runs: {error}")
            return
        self._tell([f for f in report.origins if f.severity is Severity.FAULT], keys)

    def _judge_a_stall(self) -> None:
        """Judge what is there once a host notices that none of its ranks moves."""
        noticed = [s.noticed_ns for s in stalls_in(self._out) if not s.over_ns]
        latest = max(noticed, default=0)
        if latest > self._stall_ns:
            self._stall_ns = latest
            self._judge([*self._judged, *self._job.unfinished()])

    def _tell(self, findings: list[Finding], keys: Iterable[StepKey]) -> None:
        lines = self._findings.add(findings, {key: self._job.ended_ns(key) for key in keys})
        self._command.add(lines)

    def _make_room(self) -> None:
        """Let steps go where more is held than may be: of ranks that are far apart, or a step that
        is too large."""
        while self._job.held_bytes > _MOST_BYTES:
            held = sorted(self._job.held())
            if not held:
                return
            self._say(
                f"not every step is judged while the job runs: its records, {held[0].step} among "
                f"them, take more than {_MOST_BYTES >> 20} MB; rankscope check judges the trace"
            )
            self._job.drop([held[0]])
            self._judged = [key for key in self._judged if key != held[0]]

    def _say(self, notice: str) -> None:
        kind = notice.partition(":")[0]
        if kind not in self._notices and len(self._notices) < 16:
            self._notices.add(kind)
            self._findings.say(notice)
