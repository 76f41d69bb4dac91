"""Which steps of a running job are judged, and when; what is found is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from rankscope.companion.running.findingsfile import FindingsFile
from rankscope.companion.running.runningjob import RunningJob
from rankscope.companion.running.splitstream import StepKey
from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError
from rankscope.record.finding import Finding, Kind, Severity
from rankscope.run.jobend import stalls_in
from rankscope.tree.views import Trace

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
            self._tell(running.faults, running.ended_ns)
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

    def _tell(self, findings: list[Finding], ended_ns: Mapping[StepKey, int]) -> None:
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
            self._judged = [each for each in self._judged if each != key]
            size -= self._job.bytes_of(key)


class _Judgement:
    def __init__(self, trace: Callable[[], Trace], ended_ns: Mapping[StepKey, int]) -> None:
        self._trace = trace
        self.ended_ns = ended_ns
        self.faults: list[Finding] = []
        self.trouble = ""
        self.took_s = self.ended_at = 0.0
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
            self.faults = [each for each in origins if each.severity is Severity.FAULT]
        self.ended_at = time.monotonic()
        self.took_s = self.ended_at - began
