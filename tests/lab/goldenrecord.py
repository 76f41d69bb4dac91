"""`python -m tests.lab.golden --record BOARD`: trace the jobs of a board anew, for their records.

The jobs of `faults`, `reference` and `real` are the rows of those benchmarks, faulty and not, in
float32 and a small model, but for the job that hangs, which only a launcher can start. Those of
`tests` are the jobs that tests of right programs and of pipelines trace: each is asked about by
`check`, and where one test traces several, the last of them beside the first by `diff`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.diagnosis.traced import RECORDS_VARIABLE
from tests.distributed.pool import RankFailure, RankPool
from tests.lab.faults.__main__ import FAULTS, REFERENCE, for_children
from tests.lab.faults.runs import HANG, every_run, reference_of, report_of
from tests.lab.faults.setup import Shape
from tests.lab.golden import REPOSITORY, Job, write_board

REAL = "tests.lab.real.rows"
TABLES = {"faults": FAULTS, "reference": REFERENCE, "real": REAL}
SHAPE = Shape(layers=2, hidden=8, context=4)
TESTS = tuple(f"tests/diagnosis/test_{name}.py" for name in ("right_programs", "pipelines"))


def record(board: str) -> None:
    """Trace the jobs of a board, and write their records and what is found in them."""
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        records = folder / "records"
        records.mkdir()
        os.environ[RECORDS_VARIABLE] = str(records)
        for_children()
        jobs = _of_table(TABLES[board], folder) if board in TABLES else _of_tests(folder)
        write_board(board, jobs, records)


def _of_table(table: str, folder: Path) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    pool = RankPool()
    try:
        runs = every_run(shape=SHAPE, seeds=1, dtypes=["float32"], table=table)
        for number, run in enumerate(runs):
            if run.name == HANG or not getattr(run.row, "is_installed", True):
                continue
            job = folder / "jobs" / str(number)
            try:
                report_of(pool, run, job)
            except RankFailure as error:
                print(f"left out: {run.label}: {str(error).splitlines()[-1]}", file=sys.stderr)
                continue
            reference = reference_of(pool, run, job.parent / "references")
            traces = [reference, job / "trace"] if reference else [job / "trace"]
            noted = _noted(folder)
            layout = job / "layout.toml"
            jobs[_name(run.label)] = Job(
                asked="diff" if reference else "check",
                records=[noted[str(trace)] for trace in traces],
                layout=layout.read_text() if layout.exists() else "",
                paths=list(run.row.paths),
            )
    finally:
        pool.close()
    return jobs


def _of_tests(folder: Path) -> dict[str, Job]:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--basetemp={folder / 'pytest'}"]
    subprocess.run([*command, *TESTS], cwd=REPOSITORY, check=False)
    by_test: dict[str, list[str]] = defaultdict(list)
    for line in (folder / "records" / "jobs.jsonl").read_text().splitlines():
        noted = json.loads(line)
        by_test[noted["test"].rpartition(" ")[0]].append(noted["records"])
    jobs: dict[str, Job] = {}
    for test, records in sorted(by_test.items()):
        name = _name(test.removeprefix("tests/"))
        for number, one in enumerate(records):
            jobs[f"{name} {number}"] = Job(asked="check", records=[one])
        if len(records) > 1:
            jobs[f"{name} diff"] = Job(asked="diff", records=[records[0], records[-1]])
    return jobs


def _noted(folder: Path) -> dict[str, str]:
    lines = (folder / "records" / "jobs.jsonl").read_text().splitlines()
    return {noted["trace"]: noted["records"] for noted in map(json.loads, lines)}


def _name(label: str) -> str:
    return " ".join(label.replace(",", "").split())
