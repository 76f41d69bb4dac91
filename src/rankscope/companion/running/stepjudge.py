"""Which steps of a running job are judged, and when; what is found is told.

findings.jsonl: what was found while a job ran, a line for each thing, when it was found; and the
command of `--rs-on-finding`, which is given each new line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope.companion.running.runningjob import RunningJob
from rankscope.companion.running.splitstream import StepKey
from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError
from rankscope.record.finding import Finding, Kind, Severity
from rankscope.record.texts import utc_text
from rankscope.run.folders import FINDINGS_FORMAT, FINDINGS_NAME
from rankscope.run.jobstatus import stalls_in
from rankscope.run.prepare import command_text
from rankscope.tree.views import Trace
from rankscope.words.joblines import told_in
from rankscope.words.reports import finding_json, notice_line

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
        """Take a shell command, "" for none, at work in `folder`; `say` hears of trouble."""
        self._command, self._folder, self._say = command, folder, say
        self._waiting: deque[str] = deque()
        self._more = 0
        """Findings behind those that wait, which are told in one line."""
        self._running: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def add(self, lines: Sequence[str]) -> None:
        """Hand findings to the command: of many at once the first, and how many more."""
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
        """Hand over what waits as one line, by a shell that outlives this process."""
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
        with tempfile.TemporaryFile() as stdin_file:
            stdin_file.write(f"{line}\n".encode())
            stdin_file.seek(0)
            try:
                self._running = subprocess.Popen(
                    ["/bin/sh", "-c", before + _SHELL, "sh", *words],
                    stdin=stdin_file,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # by the environment, which only this user can read: command lines are there for
                    # everybody
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
        for entry in told_in(out)[0]:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._told.add((str(entry["kind"]), tuple(map(int, entry["ranks"]))))

    def look(self) -> None:
        """Hand on what waits for the command before it."""
        self._command.look()

    def close(self) -> None:
        """Have what waits handed on behind this process."""
        self._command.close()

    def add(self, findings: Sequence[Finding], ended_ns: Mapping[StepKey, int]) -> None:
        """Append what is new among the origins of one report; `ended_ns`: when steps ended. The
        file's time of change tells that steps were judged, where nothing is new too."""
        by_cause: dict[tuple[str, tuple[int, ...]], list[Finding]] = {}
        for finding in findings:
            key = finding.kind.value, finding.ranks
            if key not in self._told:
                by_cause.setdefault(key, []).append(finding)
        now_ns = time.time_ns()
        lines = [
            _line(group, now_ns, ended_ns.get(StepKey(int(group[0].mode), group[0].step), 0))
            for group in by_cause.values()
        ]
        self._told |= by_cause.keys()
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
                # a line that was cut is ended: the next one must not be read as its rest
                file.write(f"\n{text}" if self._is_torn else text)
                os.utime(file.fileno())
        except OSError:
            self._is_torn = True  # a part of a line may be there
        else:
            self._is_torn = False
            self._waiting = []


def _line(findings: Sequence[Finding], now_ns: int, ended_ns: int) -> str:
    first, *more = findings
    named = [{"path": finding.path, "slot": finding.slot} for finding in more[:_MOST_NAMED]]
    fields: dict[str, Any] = {
        "format": FINDINGS_FORMAT,
        "found": utc_text(now_ns),
        "step_ended": utc_text(ended_ns) if ended_ns else None,
        "text": notice_line(findings),
        **finding_json(first),
        "others": named,
    }
    return json.dumps(fields)


_STEPS_BESIDE: Final = 2
"""Steps before the new ones that are judged with them: some rules look back."""
_MOST_BYTES: Final = 192 << 20
_CANCELLED_S: Final = 40.0
"""Crashes are told so long after the first at most: torchrun gives ranks that it ends 30 s."""
_LAST_S: Final = 0.3
"""So long what is judged at the end is waited for: `check` judges it again."""
_STALL_AGAIN_S: Final = 1.0
"""A stall is judged again so long after it was judged first."""
_REST: Final = 1.5
"""It rests so many times as long as it worked: several steps together cost less than one by one."""
MOST_REST_S: Final = 2.0
_LOOK_BYTES: Final = 24 << 20


class LiveCheck:
    """One job, judged step by step."""

    def __init__(self, job: RunningJob, findings: FindingsFile) -> None:
        self._out = findings.folder
        self._job, self._life, self._findings = job, job.life, findings
        self._judged: list[StepKey] = []
        """The latest, in order: the next are judged with them."""
        self._through: dict[int, int] = {}
        self._running: _Judgement | None = None
        self._crashes: tuple[list[Finding], Mapping[StepKey, int]] | None = None
        self._rests_until = self._crashed_at = 0.0
        self._stall_ns = 0
        self._stalled_at = self._judged_stall_age = 0.0

    def look(self, is_stopped: Callable[[], bool]) -> None:
        """Have the steps judged that are over by now, in a thread: meanwhile the job is read on."""
        if self._job.life != self._life:
            if self._crashes:  # what is started again was not cancelled
                self._findings.add(*self._crashes)
            self._judged, self._crashes, self._life = [], None, self._job.life
            self._through.clear()
        self._tell_crashes(is_over=False)
        for rank, trouble in self._job.trouble.items():
            notice = f"the records of rank {rank} are not judged while the job runs"
            self._findings.say(f"{notice}: {trouble}")
        if self._is_free() and time.monotonic() >= self._rests_until:
            self._judge_next()
        self._make_room()
        self._findings.look()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until what is judged now has been told, at most so long; no rest follows."""
        if self._running is not None:
            self._running.thread.join(seconds)
            self._is_free()
        self._rests_until = 0.0

    def _is_free(self) -> bool:
        """True where nothing is judged just now; what was is told."""
        running = self._running
        if running is not None and not running.thread.is_alive():
            self._running = None
            self._rests_until = running.ended_at + min(_REST * running.took_s, MOST_REST_S)
            if running.trouble:
                self._findings.say(running.trouble)
            self._take_findings(running.faults, running.ended_ns)
        return self._running is None

    def _judge_next(self) -> None:
        new = self._newest([key for key in self._job.finished() if not self._is_through(key)])
        if new:
            self._judge([*self._judged, *new])
            self._pass(new)
            self._judged = [*self._judged, *new][-_STEPS_BESIDE:]
        else:
            self._judge_a_stall()

    def needs(self, key: StepKey) -> bool:
        """True for a held step that is to be judged, or that others are judged with."""
        return not self._is_through(key) or key in self._judged

    def _is_through(self, key: StepKey) -> bool:
        return key.step <= self._through.get(key.mode, -1)

    def _pass(self, keys: Iterable[StepKey]) -> None:
        for key in keys:
            self._through[key.mode] = max(key.step, self._through.get(key.mode, -1))

    def _newest(self, keys: list[StepKey]) -> list[StepKey]:
        """Return the newest of these steps, as many as are worth one look; let older ones go."""
        part: list[StepKey] = []
        size = 0
        for key in reversed(keys):
            size += self._job.bytes_of(key)
            if part and size > _LOOK_BYTES:
                break
            part.append(key)
        passed_over = keys[: len(keys) - len(part)]
        if passed_over:
            self._findings.say(
                "steps come faster than they can be judged while the job runs: of those that wait "
                "the newest are; rankscope check judges all"
            )
            self._pass(passed_over)
        return part[::-1]

    def _judge(self, keys: list[StepKey]) -> None:
        ended_ns = {key: self._job.ended_ns(key) for key in keys}
        self._running = _Judgement(self._job.trace(keys), ended_ns)

    def _judge_a_stall(self) -> None:
        """Judge what is there once a host notices that none of its ranks moves, and again whenever
        that is twice as long ago: ranks are called hanging only after a patience of their own."""
        noticed = [s.noticed_ns for s in stalls_in(self._out) if not s.over_ns]
        latest, now = max(noticed, default=0), time.monotonic()
        if latest > self._stall_ns:
            self._stall_ns, self._stalled_at = latest, now
        elif not noticed or now - self._stalled_at < 2 * self._judged_stall_age:
            return
        self._judged_stall_age = max(now - self._stalled_at, _STALL_AGAIN_S / 2)
        finished = {*self._job.finished()}
        unfinished = [key for key in self._job.held() if self.needs(key) and key not in finished]
        self._judge([*self._judged, *sorted({*unfinished} - {*self._judged})])

    def _take_findings(self, findings: list[Finding], ended_ns: Mapping[StepKey, int]) -> None:
        crashes = [finding for finding in findings if finding.kind is Kind.CRASH]
        if crashes:
            self._crashed_at = self._crashed_at or time.monotonic()
            self._crashes = crashes, ended_ns
        self._findings.add([finding for finding in findings if finding not in crashes], ended_ns)

    def _tell_crashes(self, *, is_over: bool) -> None:
        """Tell of crashes once it is known that nobody cancelled the job: ranks that a signal ends
        look like ranks that crash until the last of them has ended, and the launcher said why."""
        if self._crashes and (is_over or time.monotonic() - self._crashed_at > _CANCELLED_S):
            if self._judged and self._job.trace(self._judged)().run.get("ended") is None:
                self._findings.add(*self._crashes)
            self._crashes, self._crashed_at = None, 0.0

    def close(self) -> None:
        """The job is over, and its launcher has said how it ended."""
        self.wait(_LAST_S)
        self._tell_crashes(is_over=True)

    def _make_room(self) -> None:
        """Let steps go where too much is held: of ranks far apart, or a step that is too large."""
        needed = sorted(key for key in self._job.held() if self.needs(key))
        size = sum(map(self._job.bytes_of, needed))
        for key in needed:
            if size <= _MOST_BYTES:
                return
            self._findings.say(
                f"not every step is judged while the job runs: its records, {key.step} among "
                f"them, take more than {_MOST_BYTES >> 20} MB; rankscope check judges the trace"
            )
            self._pass([key])
            self._judged = [judged_key for judged_key in self._judged if judged_key != key]
            size -= self._job.bytes_of(key)


class _Judgement:
    def __init__(self, trace: Callable[[], Trace], ended_ns: Mapping[StepKey, int]) -> None:
        self._trace = trace
        self.ended_ns = ended_ns
        self.faults: list[Finding] = []
        self.trouble = ""
        self.took_s = self.ended_at = 0.0
        # in a thread: records are read on meanwhile, or ranks would fill their spools
        self.thread = threading.Thread(target=self._check, name="judge", daemon=True)
        self.thread.start()

    def _check(self) -> None:
        began = time.monotonic()
        try:
            origins = check(self._trace()).origins
        except (RankscopeError, MemoryError) as error:
            why = str(error) or type(error).__name__
            self.trouble = f"steps cannot be judged while the job runs: {why}"
        else:
            self.faults = [finding for finding in origins if finding.severity is Severity.FAULT]
        self.ended_at = time.monotonic()
        self.took_s = self.ended_at - began
