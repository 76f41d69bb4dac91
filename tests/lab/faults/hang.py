"""Start the job that gets stuck, prove that it is, ask about it from another process, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.faults.expected import Expected
from tests.lab.faults.setup import Setup

JOB = Path(__file__).with_name("hang_job.py")
BIN = Path(sys.executable).parent
BEGIN_S = 120.0
"""How long the ranks may take to begin the step they get stuck in."""
STUCK_S = 4.0
"""How long no rank may use the processor before a job counts as stuck."""
ASKED_S = 60.0
"""How long it is asked about."""
LAST = "step2"


def expected(setup: Setup) -> Expected:
    """The rank that skipped the branch is missing in its collective, in which the other waits."""
    return Expected(
        kinds=("hang",),
        phases=("collective", "forward"),
        places=((f"layers.{setup.layer}.feed_forward.correction", "*"),),
        ranks=(setup.culprit,),
        evidence=(f"layers.{setup.layer}.feed_forward.correction",),
    )


class Job(NamedTuple):
    """A launcher that runs."""

    process: subprocess.Popen[bytes]
    trace: Path


@contextlib.contextmanager
def running(setup: Setup, folder: Path) -> Iterator[Job]:
    """Run the job, traced; end whatever is left of it afterwards."""
    marks, out = folder / "marks", folder / "trace"
    marks.mkdir(parents=True)
    options = ["--rs-out", out, "--rs-spool", folder / "spool", "--rs-steps", "all"]
    shape = setup.shape
    given = (marks, shape.layers, shape.hidden, setup.dtype, setup.seed, int(setup.is_faulty))
    command = [BIN / "rankscope", "run", *options, "--nproc-per-node", setup.ranks, JOB, *given]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Job(process=job, trace=out)
    finally:
        end(job)


def end(job: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end, then kill what it started and did not end itself."""
    below = descendants(job.pid)
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(120)
    for pid in (job.pid, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


def descendants(pid: int) -> list[int]:
    """Return the process ids below one, by the parents that /proc tells."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def is_stuck(setup: Setup, folder: Path) -> str:
    """Wait for the last step, and prove that no rank comes out of it.

    Returns:
        what is wrong: "" where every rank ended its training.

    Raises:
        TimeoutError: neither came to pass in time.
    """
    marks = folder / "marks"
    deadline = time.monotonic() + BEGIN_S
    while time.monotonic() < deadline:
        if len([*marks.glob("ended.*")]) == setup.ranks:
            return ""
        if len([*marks.glob(f"{LAST}.*")]) == setup.ranks and _is_resting(folder):
            waiting = setup.ranks - len([*marks.glob("ended.*")])
            if waiting:  # else they rested because they had ended meanwhile
                return f"{waiting} of {setup.ranks} ranks rest inside step 2"
        time.sleep(0.2)
    raise TimeoutError(
        f"the job neither ended nor got stuck: {(folder / 'log').read_text()[-2000:]}"
    )


def _is_resting(folder: Path) -> bool:
    """Whether no rank used a tick of the processor for `STUCK_S`, and none ended."""
    before = {pid: _ticks(pid) for pid in _ranks(folder)}
    time.sleep(STUCK_S)
    return bool(before) and all(_ticks(pid) - ticks <= 2 for pid, ticks in before.items())


def _ranks(folder: Path) -> list[int]:
    """Return the processes that run the job's script and are ranks, by their command lines."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            is_job = str(JOB) in words and str(folder / "marks") in words
            if is_job and "run" not in words[: words.index(str(JOB))]:
                found.append(int(file.parent.name))
    return found


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def asked_until_told(trace: Path) -> dict[str, Any]:
    """Ask about a job that is stuck, again as long as the answer is that it may only be slow."""
    deadline = time.monotonic() + ASKED_S
    while True:
        answer = check_elsewhere(trace)
        is_early = any(note.endswith("ask again") for note in answer["notes"])
        if not is_early or time.monotonic() > deadline:
            return answer
        time.sleep(1.0)


def check_elsewhere(trace: Path) -> dict[str, Any]:
    """Ask `rankscope check` as another process and return what it answered.

    Raises:
        RuntimeError: it answered no report; says what it wrote.
    """
    asked = subprocess.run(
        [str(BIN / "rankscope"), "check", str(trace), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        answer = json.loads(asked.stdout)
    except ValueError:
        raise RuntimeError(f"check answered no JSON: {asked.stdout}{asked.stderr}") from None
    if answer["status"] == "error":
        raise RuntimeError(f"check could not answer: {answer['errors']}")
    return dict(answer["result"])
