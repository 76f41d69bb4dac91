"""How long after the begin of a hang `rankscope top` names it, and what a status costs.

    python -m tests.lab.perf.top [HANGS] [RANKS]

Each job has two to four gloo ranks, one of which does not come to the all-reduce of some layer in
some step. From that moment `top --once` is asked again and again until it names the module in which
the others stand, the collective, and the missing rank.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rankscope.companion.running.rankstatuses import StatusWriter
from rankscope.companion.running.runningjob import RunningJob
from rankscope.record.ranks import StreamId, parse_ranks
from rankscope.run.jobstatus import write_status
from rankscope.spool.replicas import replica_path
from tests.cli.topjobs import starting
from tests.companion.running.test_streams import write_job
from tests.launcher.launches import Launch, rankscope
from tests.spool.streams import stream_bytes
from tests.waiting import wait_until

_MOST_S = 60.0


def hang(folder: Path, rng: random.Random) -> float | None:
    """Return the seconds after which a hang was named; None where that took a minute."""
    ranks = rng.randint(2, 4)
    missing, step, layer = rng.randrange(ranks), rng.randint(0, 40), rng.randrange(2)
    ways = ["ok"] * ranks
    ways[missing] = f"skips@{step}@{layer}"
    with starting(folder) as start:
        job: Launch = start(ways)
        stuck = job.meeting / "skipped"
        assert wait_until(stuck.exists, 120), job.err
        began = stuck.stat().st_mtime
        took: float | None = None
        while took is None and time.time() - began < _MOST_S:
            done = rankscope("top", job.out, "--once", "--json", "--no-check")
            if done.returncode == 0 and _is_named(
                json.loads(done.stdout)["result"], ranks, missing, layer
            ):
                took = time.time() - began
        (job.meeting / "go").touch()
        (job.meeting / "leave").touch()
        assert job.wait() == 0, job.logs
    said = "not named" if took is None else f"named after {took:.1f} s"
    print(f"{ranks} ranks, rank {missing} missing in layers.{layer} of step {step}: {said}")
    return took


def _is_named(found: dict[str, Any], ranks: int, missing: int, layer: int) -> bool:
    """True where every other rank is said to stand there and wait for the missing one."""
    stand = {
        rank
        for group in found["groups"]
        if group["where"] == f"collective of layers.{layer}"
        and group["waits_in"].startswith("all_reduce")
        and group["waits_for"] == str(missing)
        for rank in parse_ranks(group["ranks"])
    }
    return stand == {*range(ranks)} - {missing}


def status(ranks: int) -> None:
    """Print what a look and a status of many ranks cost, each with the same records."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        write_job(out / "own", steps=400)
        data = stream_bytes(out / "own")
        one = replica_path(out, StreamId(rank=0, incarnation=0))
        one.parent.mkdir()
        one.write_bytes(data)
        for rank in range(1, ranks):
            os.link(one, replica_path(out, StreamId(rank=rank, incarnation=0)))
        job = RunningJob(out, traced_ranks=ranks)
        writer = StatusWriter(job, out)
        began = time.process_time()
        while job.look():
            pass
        read = time.process_time() - began
        began = time.process_time()
        write_status(out, writer.status())
        wrote = time.process_time() - began
    each = len(data) / 1e6
    print(
        f"{ranks} ranks with {each:.1f} MB each: read with {ranks * each / read:.0f} MB/s of a "
        f"core, a status takes {wrote * 1e3:.0f} ms of it"
    )


def main(hangs: int, ranks: int) -> None:
    """Print how long each hang took to be named, and what a status costs."""
    rng = random.Random(hangs)
    with tempfile.TemporaryDirectory() as folder:
        took = [hang(Path(folder) / str(number), rng) for number in range(hangs)]
    named = sorted(each for each in took if each is not None)
    in_time = sum(each <= 15 for each in named)
    if named:
        print(
            f"{in_time} of {hangs} named within 15 s; median {median(named):.1f} s, "
            f"longest {named[-1]:.1f} s"
        )
    status(ranks)


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["20", "256"][len(sys.argv) - 1 :])))
