"""A running job, played from the records of one that is over, whose tree grows meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rankscope.companion.running.runningjob import KeepSizes, RunningJob, StepKeeper
from rankscope.run.folders import REPLICA_FOLDER
from rankscope.spool.recordformat import CELL_BYTES
from rankscope.tree.views import Trace

Dataset = Callable[[Trace], None]


def keeper(work: Path, ranks: int, dataset: Dataset | None = None) -> tuple[RunningJob, StepKeeper]:
    def fail(line: str) -> None:
        raise AssertionError(line)

    sizes = KeepSizes(begin=0, part=0, free=1)
    job = RunningJob(work, traced_ranks=ranks)
    job.listeners.append(StepKeeper(job, work, say=fail, sizes=sizes, dataset=dataset))
    return job, job.listeners[0]


def grown(
    trace: Path, work: Path, *, pieces: int, kills: bool = False, dataset: Dataset | None = None
) -> Iterator[Path]:
    """Yield the trace folder of a job that writes what ranks of another wrote, after each piece.

    Args:
        trace: a trace folder with its records.
        work: the new one.
        pieces: in so many the records come, from all ranks alike.
        kills: a new process looks after each piece.
        dataset: as of `StepKeeper`.
    """
    spool = work / REPLICA_FOLDER
    spool.mkdir(parents=True)
    replicas = sorted((trace / REPLICA_FOLDER).glob("*.cells"))
    job, watch = keeper(work, len(replicas), dataset)
    try:
        for piece in range(1, pieces + 1):
            for number, replica in enumerate(replicas):
                whole = replica.read_bytes()
                late = number * 7 * CELL_BYTES if piece < pieces else 0  # ranks are not equally far
                end = max(0, len(whole) * piece // pieces - late) // CELL_BYTES * CELL_BYTES
                with (spool / replica.name).open("ab") as file:
                    file.write(whole[file.tell() : max(end, file.tell())])
            if kills:
                watch.close()
                job, watch = keeper(work, len(replicas), dataset)
            for _ in range(50):
                if not job.look():
                    break
            yield work
    finally:
        watch.close()
    for marker in (trace / REPLICA_FOLDER).glob("rank*.json"):
        shutil.copy(marker, spool)
