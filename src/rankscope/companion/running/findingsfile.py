"""findings.jsonl: what was found while a job ran, a line for each thing, when it was found; and the
command of `--rs-on-finding`, which is given each new line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope.companion.running.splitstream import StepKey
from rankscope.record.finding import Finding
from rankscope.record.texts import utc_text
from rankscope.run.filenames import FINDINGS_FORMAT, FINDINGS_NAME
from rankscope.run.prepare import command_text
from rankscope.words.joblines import told_in
from rankscope.words.reportdata import finding_json
from rankscope.words.reports import notice_line

_MOST_NOTICES: Final = 16
_MOST_NAMED: Final = 100
_MOST_WAITING: Final = 1000

_COMMAND: Final = "--rs-on-finding: the command"
_COMMAND_S: Final = 60.0
_MOST_UNTOLD: Final = 16
"""Findings that wait for the command each by itself."""
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
        """Take a command for the shell, "" for none, at work in `folder`; `say` hears of
        trouble."""
        self._command, self._folder, self._say = command, folder, say
        self._waiting: deque[str] = deque()
        self._more = 0
        """Findings behind those that wait, which are told in one line."""
        self._running: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def add(self, lines: Sequence[str]) -> None:
        """Have the command told of findings: of many at once the first, and how many more."""
        for line in lines if self._command else ():
            if self._more or len(self._waiting) >= _MOST_UNTOLD:
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
        """Have what waits handed over as one line, by a shell that outlives this process and waits
        for the command that runs."""
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
        text = f"{self._more} more findings: {command_text('check', self._folder)}"
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


class FindingsFile:
    """The file of one trace folder: one line for findings of one kind on the same ranks."""

    def __init__(self, out: Path, command: str = "") -> None:
        """Learn what a process before this one told; `command` as of `FindingCommand`."""
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
        """Append what is new among the origins of one report; `ended_ns`: when steps ended. The
        file's time of change tells that steps were judged, where nothing is new too."""
        alike: dict[tuple[str, tuple[int, ...]], list[Finding]] = {}
        for finding in findings:
            key = finding.kind.value, finding.ranks
            if key not in self._told:
                alike.setdefault(key, []).append(finding)
        now_ns = time.time_ns()
        lines = [
            _line(same, now_ns, ended_ns.get(StepKey(int(same[0].mode), same[0].step), 0))
            for same in alike.values()
        ]
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
    first, *others = findings
    named = [{"path": each.path, "slot": each.slot} for each in others[:_MOST_NAMED]]
    fields: dict[str, Any] = {
        "format": FINDINGS_FORMAT,
        "found": utc_text(now_ns),
        "step_ended": utc_text(ended_ns) if ended_ns else None,
        "text": notice_line(findings),
        **finding_json(first),
        "others": named,
    }
    return json.dumps(fields)
