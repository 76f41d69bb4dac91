"""Real jobs on ranks of the pool, traced and judged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.agent.join import RUN_FOLDER_VARIABLE
from rankscope.diagnosis.check import check
from rankscope.record.finding import Report
from rankscope.run.folders import (
    REPLICA_FOLDER,
    RunHeader,
    host_run_folder,
    run_key,
    spool_base,
    write_run_header,
)
from rankscope.spool.recordformat import CELL_BYTES
from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from tests.distributed.pool import RankPool

__all__ = ["RECORDS_VARIABLE", "report_of", "traced", "traced_with_answers"]

RECORDS_VARIABLE = "TESTS_KEEP_RECORDS"
"""Names a folder where the records of every job are kept, for tests/lab/goldenrecord.py; none of
rankscope's own, which tests do not see."""


def traced(
    pool: RankPool,
    job: Callable[..., Any],
    *args: Any,
    folder: Path,
    world: int,
    timeout_s: float = 60.0,
) -> Path:
    """Run `job(*args, out)` on ranks and return the trace that it left at `out`."""
    return traced_with_answers(pool, job, *args, folder=folder, world=world, timeout_s=timeout_s)[0]


def traced_with_answers(
    pool: RankPool,
    job: Callable[..., Any],
    *args: Any,
    folder: Path,
    world: int,
    timeout_s: float = 60.0,
) -> tuple[Path, list[Any]]:
    """Do the same, and return what `job` returned as well, by rank.

    The tree is built from the ranks' own spools, as `rankscope recover` does: to start a relay and
    a collector for every job takes longer than the job.
    """
    out, label = folder / "trace", str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = os.environ.get(RECORDS_VARIABLE)
    if world == 1:  # the block builds the tree of one process itself
        variables = {"RANKSCOPE_KEEP_SPOOL": "1"} if kept else {}
        answers = pool.run(job, *args, str(out), world_size=1, timeout_s=timeout_s, env=variables)
        if kept:
            _keep(out / REPLICA_FOLDER, out, Path(kept))
        return out, answers
    run_folder = host_run_folder(spool_base(folder / "spool"), run_key(label))
    nobody = "ipc://nobody"  # full tensors stay in the run folder, and nothing is shipped
    header = RunHeader(run_id=label, out=out, collector=nobody, world_size=world)
    write_run_header(run_folder, header)
    env = {RUN_FOLDER_VARIABLE: str(run_folder)}
    answers = pool.run(job, *args, str(out), world_size=world, timeout_s=timeout_s, env=env)
    recover([run_folder], out)
    if kept:
        _keep(run_folder, out, Path(kept))
    shutil.rmtree(folder / "spool")
    return out, answers


def _keep(records: Path, trace: Path, folder: Path) -> None:
    """Copy the records of a job, and note of which trace and which test they are."""
    name = f"{os.getpid()}-{len([*folder.glob(f'{os.getpid()}-*')])}"
    for file in filter(Path.is_file, records.glob("**/*")):
        to = folder / name / file.relative_to(records)
        to.parent.mkdir(parents=True, exist_ok=True)
        written = file.read_bytes().rstrip(b"\0")  # a file of cells has room for more
        to.write_bytes(written + bytes(-len(written) % CELL_BYTES))
    noted = {"records": name, "trace": str(trace), "test": os.environ.get("PYTEST_CURRENT_TEST")}
    with (folder / "jobs.jsonl").open("a") as file:
        file.write(json.dumps(noted) + "\n")


def report_of(
    pool: RankPool, job: Callable[..., Any], *args: Any, folder: Path, world: int = 2
) -> Report:
    """Trace a job and check it."""
    return check(open_trace(traced(pool, job, *args, folder=folder, world=world)))
