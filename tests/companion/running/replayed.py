"""A running job, played from the records of one that is over: replicas grow piece by piece, and the
live check looks after each.

python -m tests.companion.running.replayed FOLDER ...    # traces with records: --rs-keep-spool
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.companion.running.runningjob import RunningJob
from rankscope.companion.running.stepjudge import FindingsFile, LiveCheck
from rankscope.run.folders import FINDINGS_NAME, REPLICA_FOLDER
from rankscope.spool.recordformat import CELL_BYTES


def told(folder: Path) -> list[dict[str, Any]]:
    """Return what findings.jsonl of a trace folder says."""
    try:
        return [json.loads(line) for line in (folder / FINDINGS_NAME).read_text().splitlines()]
    except FileNotFoundError:
        return []


class JudgedJob(RunningJob):
    """A job whose steps are judged when it is looked at."""

    def __init__(self, work: Path, ranks: int) -> None:
        super().__init__(work, traced_ranks=ranks)
        self.judge = LiveCheck(self, FindingsFile(work))
        self.listeners.append(self.judge)

    def look(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        is_busy = super().look(is_stopped)
        self.judge.wait()
        return is_busy


def replayed(trace: Path, work: Path, *, pieces: int = 12) -> list[dict[str, Any]]:
    """Return what the live check tells of a job.

    Args:
        trace: a trace folder with its records.
        work: an empty folder.
        pieces: in so many the records come, from all ranks alike.
    """
    spool = work / REPLICA_FOLDER
    spool.mkdir()
    replicas = sorted((trace / REPLICA_FOLDER).glob("*.cells"))
    job = JudgedJob(work, len(replicas))
    for piece in range(1, pieces + 1):
        for replica in replicas:
            whole = replica.read_bytes()
            end = len(whole) if piece == pieces else len(whole) * piece // pieces
            (spool / replica.name).write_bytes(whole[: end - end % CELL_BYTES])
        while job.look():
            pass
    for marker in (trace / REPLICA_FOLDER).glob("rank*.json"):
        shutil.copy(marker, spool)
    job.look()
    return told(work)


def main() -> None:
    """Print what is told of each trace."""
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            lines = replayed(Path(name), Path(work))
        print(name, json.dumps([line.get("text") or line.get("notice") for line in lines]))


if __name__ == "__main__":
    main()
