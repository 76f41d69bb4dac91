"""The JSON data of `rankscope top`, from which its screen is made too. It is read from
the status and the findings of a running job, of a finished one from its trace."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from rankscope.diagnosis.check import check
from rankscope.errors import RankscopeError, TraceError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.ranks import ranks_text
from rankscope.record.texts import utc_text
from rankscope.run.folders import REPLICA_FOLDER, TRACE_NAME
from rankscope.run.jobstatus import EndedStep, JobStatus, RankStatus, fullest_spool, stalls_in
from rankscope.settings import settings_from
from rankscope.tree.reader import is_at_work, open_trace, received_bytes, status_in
from rankscope.tree.tracejson import UNREADABLE
from rankscope.words.joblines import told_in
from rankscope.words.page.verdicthtml import places_in
from rankscope.words.reports import finding_of, report_json

_MOST_WORST: Final = 10
_OF_WORST: Final = (
    *("rank", "host", "step_s", "own_s", "beside_all", "beside_history"),
    *("slow_steps", "compared_steps"),
)
"""Attributes of `RankStatus` in the data of each rank."""
_FEWEST_STEPS: Final = 3

Group = dict[str, Any]
SORTS: Final[dict[str, Callable[[Group], Any]]] = {
    "rank": lambda group: (),
    "age": lambda group: -(group["age_s"] or [0.0])[-1],
    "time": lambda group: -(group["step_s"] or [0.0])[-1],
}
"""Orders of groups, by name; groups alike in it stand in order of rank."""
_WAIT_S: Final = 3.0
"""For a status that was written after the question."""
_FIRST_WAIT_S: Final = 10.0
"""For the first status of a job that has just begun."""
_POLL_S: Final = 0.05
_VERDICT_S: Final = 600.0
_MOST_JUDGED_BYTES: Final = 256 << 20
"""Records that one answer judges. Of more the live check tells."""
_NICE: Final = 10
_NO_VERDICT: Final[dict[str, Any]] = {"verdict": None, "age_s": None, "trouble": "", "findings": []}


class TopSource:
    """One trace folder, and what of it is shown."""

    def __init__(self, folder: Path, layout: LayoutFile | None, *, judges: bool) -> None:
        """Look at it for the first time; TraceError: there is nothing in the folder, and nobody at
        work on it. `layout` is for the verdict, which `judges` asks for."""
        self.sort = "rank"
        self._ranks: tuple[int, ...] | None = None
        self._folder, self._layouts, self._judges = folder, layout, judges
        self._status = JobStatus()
        self._read: dict[str, tuple[JobStatus, dict[str, Any]]] = {}
        """Of a job on which nobody is at work any more: made of its trace, or of its records."""
        if not self._is_ended():
            self._status = status_in(folder)
            if not received_bytes(folder) and not is_at_work(folder, self._status.run):
                raise TraceError(
                    f"{folder}: holds neither {TRACE_NAME} nor records in {REPLICA_FOLDER}/, and "
                    "nobody is at work on it; give the trace folder of a running job"
                )

    def choose(self, ranks: str) -> None:
        """Show these ranks alone, `0-3,8` or `all`; SettingError: this is no list of ranks."""
        self._ranks = settings_from({"ranks": ranks.strip() or "all"}, {}).ranks

    def one(self) -> dict[str, Any]:
        """Return what there is to say, the verdict included; takes as long as that takes."""
        began, asked_ns = time.monotonic(), time.time_ns()
        while not self._is_ended():
            self._status = status_in(self._folder)
            most_s = _WAIT_S
            if not self._status.written_ns:  # where no record came there will be none
                most_s = _FIRST_WAIT_S if received_bytes(self._folder) else 0.0
            is_new = self._status.written_ns > asked_ns
            if is_new or time.monotonic() - began > most_s or not self._is_at_work():
                return self.now(self._judged() if self._judges else None)
            time.sleep(_POLL_S)
        return self.now()

    def now(self, check: dict[str, Any] | None = None) -> dict[str, Any]:
        """Look again; return what there is to say, by default with what the live check told."""
        if self._is_ended():
            return self._summary("ended", check)
        self._status = status_in(self._folder)
        return self._summary("running" if self._is_at_work() else "deserted", check)

    def _is_at_work(self) -> bool:
        return is_at_work(self._folder, self._status.run)

    def _summary(self, state: str, check: dict[str, Any] | None) -> dict[str, Any]:
        status = self._status
        if state != "running":
            if state not in self._read:
                self._read[state] = self._places(is_judged=state == "ended")
            status, summary = self._read[state]
            check = check or (summary if state == "ended" else None)
        chosen = [s for s in status.ranks if self._ranks is None or s.rank in self._ranks]
        now_ns = time.time_ns()
        stalls = [s.sentence(now_ns) for s in stalls_in(self._folder) if not s.over_ns]
        return {
            **_job_summary(self._folder, status, chosen, state=state, sort=self.sort),
            "stalls": stalls if state == "running" else [],
            "check": check or self._told(),
        }

    def _judged(self) -> dict[str, Any]:
        """Judge all that has come, once, as `rankscope check` does."""
        size = received_bytes(self._folder)
        if size > _MOST_JUDGED_BYTES:
            gb = f"{size / 1e9:.1f} GB of records"
            return self._told(f"not judged as a whole: {gb}; rankscope check judges them")
        if not size:
            return _NO_VERDICT
        began = time.monotonic()

        def go_on(action: str, part: float) -> None:
            if time.monotonic() - began > _VERDICT_S:
                raise TraceError(f"not judged in {_VERDICT_S:.0f} s: {action}, {part:.0%} done")

        with contextlib.suppress(OSError):
            os.nice(_NICE)
        try:
            report = check(open_trace(self._folder, progress=go_on), self._layouts, progress=go_on)
        except (RankscopeError, OSError, MemoryError, RecursionError, *UNREADABLE) as error:
            return {**_NO_VERDICT, "trouble": f"{type(error).__name__}: {error}"}
        return {**_NO_VERDICT, **report_json(report), "age_s": time.monotonic() - began}

    def _told(self, *lines: str) -> dict[str, Any]:
        """Return what the live check told so far; `lines` say why nothing else was asked."""
        if not self._judges:
            return {**_NO_VERDICT, "trouble": "off"}
        entries, age_s = told_in(self._folder)
        is_off = self._status.run["settings"].get("live-check") == "0"
        if is_off or age_s is None:
            reason = "is off for this job" if is_off else "has judged no step"
            lines += (f"the live check {reason}; rankscope check judges what has come",)
        lines += tuple(str(entry["notice"]) for entry in entries[::-1] if "notice" in entry)
        findings = [entry for entry in entries if _is_finding(entry)]
        verdict = "fault" if findings else None if lines else "incomplete"
        trouble = "; ".join(lines)
        return {"verdict": verdict, "age_s": age_s, "trouble": trouble, "findings": findings}

    def _is_ended(self) -> bool:
        return (self._folder / TRACE_NAME).exists()

    def _places(self, *, is_judged: bool) -> tuple[JobStatus, dict[str, Any]]:
        """Return where ranks were last, and how they ended, and a verdict where one is asked for:
        read once, out of the trace, or of the records as `recover` would join them."""
        size = received_bytes(self._folder)
        if not is_judged and size > _MOST_JUDGED_BYTES:
            return self._status, _NO_VERDICT
        try:
            trace = open_trace(self._folder)
        except RankscopeError:
            if is_judged:
                raise
            return self._status, _NO_VERDICT  # nothing but a status is there
        judged = report_json(check(trace, self._layouts)) if is_judged else {}
        answer = {**_NO_VERDICT, **judged, **({"age_s": 0.0} if is_judged else {})}
        hosts = {int(entry["rank"]): str(entry["host"]) for entry in trace.run["ranks"]}
        by_rank = {entry.rank: entry for entry in self._status.ranks}
        ranks = tuple(
            replace(by_rank.get(rank, RankStatus(rank=rank, host=hosts.get(rank, ""), place=place)),
                    place=place)
            for rank, place in sorted(places_in(trace)[0].items())
        )  # fmt: skip
        run = {"id": str(trace.run["id"]), "settings": self._status.run["settings"]}
        world_size = int(trace.run["world_size"])
        return replace(self._status, run=run, world_size=world_size, ranks=ranks), answer


def _job_summary(
    folder: Path, status: JobStatus, statuses: Sequence[RankStatus], *, state: str, sort: str
) -> dict[str, Any]:
    """Return the state of a job; fields as in docs/commands/top.md. `statuses`: of its ranks
    that are to be shown; `state`: running, deserted or ended."""
    ranks = [status.rank for status in statuses]
    hosts = {status.host for status in statuses if status.host}
    steps = [s.step for s in statuses if s.step is not None and s.mode is Mode.TRAIN]
    step_times = [status.step_s for status in statuses if status.step_s is not None]
    totals, written_ns = status.totals, status.written_ns
    return {
        "trace": str(folder),
        "at": utc_text(time.time_ns()),
        "run": status.run["id"],
        "state": state,
        "world_size": status.world_size,
        "ranks": ranks_text(ranks),
        "hosts": len(hosts),
        "ranks_by_state": dict(sorted(Counter(s.place.state for s in statuses).items())),
        "step": max(steps, default=None),
        "step_s": median(step_times) if step_times else None,
        "records_per_s": totals.records_per_s,
        "bytes_per_s": totals.bytes_per_s,
        "received_bytes": totals.received_bytes if written_ns else received_bytes(folder),
        "lost_records": sum(status.lost_records for status in statuses),
        "skipped": False,  # by no version since there is one reader
        "unread_bytes": totals.unread_bytes,
        "status_age_s": status.age_s,
        "spool": fullest_spool(statuses),
        "groups": sorted(_groups(statuses), key=SORTS[sort]),
        "worst": _worst(statuses),
        "loss": _spread(statuses, lambda step: step.loss),
        "grad_norm": _spread(statuses, lambda step: step.grad_norm),
    }


def _groups(statuses: Sequence[RankStatus]) -> list[Group]:
    """Return groups of ranks in the same state, the one of the lowest rank first."""
    members: dict[object, list[RankStatus]] = {}
    for status in statuses:
        key = (status.place, status.is_step_over, status.waits_for, _is_slow(status))
        members.setdefault(key, []).append(status)
    return [
        {
            "ranks": ranks_text(status.rank for status in group),
            "state": group[0].place.state,
            "step": group[0].place.step,
            "step_over": group[0].is_step_over,
            "where": group[0].place.where,
            "waits_in": group[0].place.waits_in if group[0].place.op else "",
            "waits_for": ranks_text(group[0].waits_for),
            "slow": _is_slow(group[0]),
            "age_s": _range(status.age_s for status in group),
            "step_s": _range(status.step_s for status in group),
            "beside_all": _range(status.beside_all for status in group),
            "beside_history": _range(status.beside_history for status in group),
        }
        for group in members.values()
    ]


def _is_slow(status: RankStatus) -> bool:
    """True for a rank that was slower than the others in half of its last steps: these are not like
    the others, those that were slow once are."""
    return 2 * status.slow_steps >= status.compared_steps >= _FEWEST_STEPS


def _range(numbers: Any) -> list[float] | None:
    """Return the least and the greatest of those that are known; None where none is."""
    present = [number for number in numbers if number is not None]
    return [min(present), max(present)] if present else None


def _worst(statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
    """Return the ranks that took longest in their last step beside the median, slowest first."""
    compared = [status for status in statuses if status.beside_all is not None]
    compared.sort(key=lambda status: (-(status.beside_all or 0.0), -status.slow_steps))
    return [{name: getattr(entry, name) for name in _OF_WORST} for entry in compared[:_MOST_WORST]]


def _spread(
    statuses: Sequence[RankStatus], number: Callable[[EndedStep], float | None]
) -> dict[str, Any] | None:
    """Return the least and greatest of a number, with their ranks, in the last step that has it on
    all ranks that have it at all, and the ranks where it is not finite. None where none has it."""
    by_status = [{step.step: number(step) for step in status.ended} for status in statuses]
    pairs = [
        (status.rank, {step: value for step, value in numbers.items() if value is not None})
        for status, numbers in zip(statuses, by_status)
    ]
    pairs = [(rank, numbers) for rank, numbers in pairs if numbers]
    common = set.intersection(*(set(numbers) for _, numbers in pairs)) if pairs else set()
    if not common:
        return None
    step = max(common)
    values = sorted(
        (numbers[step], rank) for rank, numbers in pairs if math.isfinite(numbers[step])
    )
    return {
        "step": step,
        "min": values[0][0] if values else None,
        "min_rank": values[0][1] if values else None,
        "max": values[-1][0] if values else None,
        "max_rank": values[-1][1] if values else None,
        "ranks": len(pairs),
        "not_finite": ranks_text(r for r, numbers in pairs if not math.isfinite(numbers[step])),
    }


def _is_finding(data: dict[str, Any]) -> bool:
    """True for the data of a finding that this version knows how to read."""
    try:
        return bool(finding_of(data))
    except (KeyError, TypeError, ValueError):
        return False
