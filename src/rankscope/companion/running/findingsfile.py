"""findings.jsonl: what was found while a job ran, a line for each thing, when it was found."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope.companion.running.findingcommand import FindingCommand
from rankscope.companion.running.splitstream import StepKey
from rankscope.diagnosis.finalreport import finding_json
from rankscope.record.finding import Finding
from rankscope.record.ranklists import ranks_named
from rankscope.record.timetext import utc_text
from rankscope.record.visibletext import visible
from rankscope.run.filenames import FINDINGS_FORMAT, FINDINGS_NAME
from rankscope.run.findingnotices import told_in

__all__ = ["FindingsFile"]

_MOST_NOTICES: Final = 16
_MOST_NAMED: Final = 100
_MOST_WAITING: Final = 1000


class FindingsFile:
    """The file of one trace folder, appended to.

    What is found of one kind on the same ranks is one line, told once: later it follows from that.
    """

    def __init__(self, out: Path, command: str = "") -> None:
        """Learn what is told there already, by a process before this one.

        Args:
            out: the trace folder.
            command: given each new finding, as of `FindingCommand`.
        """
        self.folder = out
        self._command = FindingCommand(command, out, self.say)
        self._path = out / FINDINGS_NAME
        self._notices: set[str] = set()
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        self._waiting: list[str] = []
        self._is_torn = False
        for told in told_in(out)[0]:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._told.add((str(told["kind"]), tuple(map(int, told["ranks"]))))

    def look(self) -> None:
        """Hand on what waits for the command before it."""
        self._command.look()

    def close(self) -> None:
        """Have what waits handed on behind this process."""
        self._command.close()

    def add(self, findings: Sequence[Finding], ended_ns: Mapping[StepKey, int]) -> None:
        """Append what is new among the findings of one look. Where nothing is, the file's time of
        change alone tells that steps were judged.

        Args:
            findings: origins of one report.
            ended_ns: wall clock at which steps ended.
        """
        alike: dict[tuple[str, tuple[int, ...]], list[Finding]] = {}
        for finding in findings:
            key = finding.kind.value, finding.ranks
            if key not in self._told:
                alike.setdefault(key, []).append(finding)
        now_ns = time.time_ns()
        lines = []
        for same in alike.values():
            step = StepKey(int(same[0].mode), same[0].step)
            lines.append(_line(same, now_ns, ended_ns.get(step, 0)))
        self._told |= alike.keys()
        self._append(lines)
        self._command.add(lines)

    def say(self, notice: str) -> None:
        """Append what is not done while the job runs, once for what stands before a colon."""
        kind = notice.partition(":")[0]
        if kind in self._notices or len(self._notices) >= _MOST_NOTICES:
            return
        self._notices.add(kind)
        fields = {"format": FINDINGS_FORMAT, "found": utc_text(time.time_ns()), "notice": notice}
        self._append([json.dumps(fields)])

    def _append(self, lines: Sequence[str]) -> None:
        """Append lines, those first that a full disk did not take before."""
        self._waiting = [*self._waiting, *lines][:_MOST_WAITING]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        text = "".join(f"{line}\n" for line in self._waiting)
        try:
            with os.fdopen(os.open(self._path, flags, 0o600), "w") as file:
                file.write(f"\n{text}" if self._is_torn else text)
                os.utime(file.fileno())
        except OSError:
            self._is_torn = True  # a part of a line may be there
        else:
            self._is_torn = False
            self._waiting = []


def _line(findings: Sequence[Finding], now_ns: int, ended_ns: int) -> str:
    """Return the line of findings of one kind on the same ranks, the first of which it tells."""
    first, *others = findings
    place = visible(" ".join(filter(None, (first.path or "(root)", first.slot))))
    more = f" and {len(others)} more" if others else ""
    named = [{"path": each.path, "slot": each.slot} for each in others[:_MOST_NAMED]]
    fields: dict[str, Any] = {
        "format": FINDINGS_FORMAT,
        "found": utc_text(now_ns),
        "step_ended": utc_text(ended_ns) if ended_ns else None,
        "text": f"{first.mode.word} step {first.step}: {first.kind.value} at {place}{more}, "
        f"{ranks_named(first.ranks)}",
        **finding_json(first),
        "others": named,
    }
    return json.dumps(fields)
