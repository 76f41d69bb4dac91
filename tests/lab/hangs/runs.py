"""Run a job of the board until it ends or stands, and say what `check` says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rankscope.agent.join import RUN_FOLDER_VARIABLE
from rankscope.diagnosis.check import check
from rankscope.record.finding import Kind, Report
from rankscope.run.folders import (
    RunHeader,
    host_run_folder,
    run_key,
    spool_base,
    write_run_header,
)
from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from tests import forked
from tests.lab.hangs.rows import Hang

JOB = Path(__file__).with_name("job.py")
ENDED_S = 120.0
STANDS_S = 3.0
"""Without a tick of the processor for so long, a job that is to be killed stands."""


def traced(row: Hang, folder: Path) -> Path:
    """Run a job; return the trace that its ranks left.

    Raises:
        TimeoutError: it neither ended nor stood still in time.
    """
    folder.mkdir(parents=True)
    out = folder / "trace"
    run_folder = host_run_folder(spool_base(folder / "spool"), run_key(str(folder)))
    header = RunHeader(run_id=row.name, out=out, collector="ipc://nobody", world_size=row.ranks)
    write_run_header(run_folder, header)
    jobs = []
    for rank in range(row.ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank}
        place |= {"WORLD_SIZE": row.ranks, "LOCAL_WORLD_SIZE": row.ranks}
        environ = {**os.environ, **{name: str(number) for name, number in place.items()}}
        environ[RUN_FOLDER_VARIABLE] = str(run_folder)
        with (folder / f"log.{rank}").open("wb") as log:
            command = [sys.executable, str(JOB), row.name, str(folder / "store"), str(out)]
            jobs.append(
                forked.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
            )
    try:
        _wait(jobs, row)
    finally:
        for job in jobs:
            if job.poll() is None:
                job.send_signal(signal.SIGKILL)
            job.wait()
    recover([run_folder], out)
    return out


def _wait(jobs: list[subprocess.Popen[bytes]], row: Hang) -> None:
    deadline, ticks, since = time.monotonic() + ENDED_S, [0], time.monotonic()
    while any(job.poll() is None for job in jobs):
        time.sleep(0.05)
        latest = [_ticks(job.pid) for job in jobs if job.poll() is None]
        if sum(latest) > sum(ticks) + len(latest):
            ticks, since = latest, time.monotonic()
        if row.is_killed and time.monotonic() - since > STANDS_S:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{row.name} neither ended nor stood still")


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was said of a job."""

    row: Hang
    said: str
    is_right: bool


def judged(row: Hang, folder: Path) -> Outcome:
    """Run a job and judge what `check` says of it."""
    report = check(open_trace(traced(row, folder)))
    return Outcome(row=row, said=said(report), is_right=is_right(row, report))


def said(report: Report) -> str:
    """Return all origins in one line."""
    origins = [f"{f.kind.value} {f.ranks} {f.phase.word}: {f.message}" for f in report.origins]
    return "; ".join(origins) or "no fault"


def is_right(row: Hang, report: Report) -> bool:
    """True where a hang names who is missing, and nothing but what they did before it is named
    beside it."""
    origins, right = report.origins, (row.missing, row.or_missing or row.missing)
    if not row.missing:
        return not origins
    hangs = [f for f in report.findings if f.kind is Kind.HANG]
    of_origins = [finding for finding in hangs if finding.is_origin]
    others = [finding for finding in origins if finding.kind is not Kind.HANG]
    are_explained = all(f.kind is Kind.STRUCTURE and {*row.missing} <= {*f.ranks} for f in others)
    return (
        any(finding.ranks in right for finding in hangs)
        and all(finding.ranks in right for finding in of_origins)
        and are_explained
        and all(any(words in f.message for f in origins) for words in row.evidence)
    )
