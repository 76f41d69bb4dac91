"""`python -m tests.lab.golden`: what is found in recorded jobs, beside what was found before.

A board is an archive of records, as ranks wrote them, and a file of jobs with what `check` or
`diff` found in each: in numbers and places, not in sentences. The records become a tree anew and
are judged anew, without ranks and without torch; every difference is a line. 1 where there is one.

    python -m tests.lab.golden                    # replay all boards: minutes
    python -m tests.lab.golden real --only fsdp   # jobs of one board with this in their names
    python -m tests.lab.golden --accept           # what is found now is right: write it down
    python -m tests.lab.golden --record real      # trace the jobs of a board anew, and accept

Read what `git diff` says of the jobs before an accepted change is committed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.layout.layoutfile import LayoutFile
from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from rankscope.words.reports import report_json
from tests.archives import pack, unpack

__all__ = [
    "BOARDS",
    "REPOSITORY",
    "Job",
    "differences",
    "facts",
    "rebuilt",
    "replayed",
    "unpacked",
    "write_board",
]

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "golden"
BOARDS = ("faults", "reference", "real", "tests")
SENTENCES = ("message", "advice", "notes", "reason", "text", "format")
_DIGITS = 5
"""Significant ones of a number: sums of other processors differ in the last of sixteen."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of recorded traces, and what was found."""

    asked: str
    """`check`, or `diff`."""
    records: list[str]
    """The folder of a trace; for `diff` the reference's first."""
    layout: str = ""
    """Text of the layout file, "" for none."""
    paths: list[str] = field(default_factory=list)
    """As `rankscope diff --map` takes them."""
    found: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("boards", nargs="*", choices=[*BOARDS, []], help="all by default")
    parser.add_argument("--only", default="", help="jobs with this in their names")
    parser.add_argument("--accept", action="store_true", help="write down what is found now")
    parser.add_argument("--record", action="store_true", help="trace the jobs of these boards anew")
    given = parser.parse_args()
    boards = given.boards or BOARDS
    if given.record:
        from tests.lab.goldenrecord import record

        for board in boards:
            record(board)
        return 0
    count = different = 0
    for board in boards:
        jobs = read_jobs(board)
        names = [name for name in jobs if given.only in name]
        with unpacked(board) as records, ProcessPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(functools.partial(replayed, records), [jobs[n] for n in names])
            for name, now in zip(names, found, strict=True):
                lines = list(differences(jobs[name].found, now))
                for line in lines:
                    print(f"{board}: {name}: {line}", flush=True)
                count, different = count + 1, different + bool(lines)
                jobs[name] = Job(**{**asdict(jobs[name]), "found": now})
        if given.accept:
            _write_jobs(board, jobs)
    print(f"{count} jobs, {different} differ{', accepted' if given.accept else ''}")
    return int(different > 0 and not given.accept)


def read_jobs(board: str) -> dict[str, Job]:
    """Return the jobs of a board by name."""
    written = json.loads((FOLDER / f"{board}.json").read_text())
    return {name: Job(**job) for name, job in written.items()}


def _write_jobs(board: str, jobs: dict[str, Job]) -> None:
    lines = (f"{json.dumps(n)}: {json.dumps(asdict(j), sort_keys=True)}" for n, j in jobs.items())
    (FOLDER / f"{board}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_board(board: str, jobs: dict[str, Job], records: Path) -> None:
    """Write the archive of a board and what is found in its jobs.

    Args:
        records: a folder with the records that the jobs name.
    """
    FOLDER.mkdir(exist_ok=True)
    names = {old: f"{n:04d}" for n, old in enumerate(_used(jobs))}
    files = [
        (f"{new}/{file.relative_to(records / old)}", file)
        for old, new in names.items()
        for file in sorted(filter(Path.is_file, (records / old).glob("**/*")))
    ]
    pack(FOLDER / f"{board}.tar.xz", files)
    renamed = {n: [names[one] for one in job.records] for n, job in jobs.items()}
    jobs = {n: Job(**{**asdict(job), "records": renamed[n]}) for n, job in jobs.items()}
    with unpacked(board) as folder:
        found = {n: replayed(folder, job) for n, job in jobs.items()}
    _write_jobs(board, {n: Job(**{**asdict(j), "found": found[n]}) for n, j in jobs.items()})


def _used(jobs: dict[str, Job]) -> list[str]:
    return list(dict.fromkeys(one for job in jobs.values() for one in job.records))


@contextlib.contextmanager
def unpacked(board: str, only: Sequence[Job] = ()) -> Iterator[Path]:
    """Give the records of a board, or of some of its jobs, in a folder that goes afterwards."""
    wanted = {one for job in only for one in job.records}  # all where none are named
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        unpack(FOLDER / f"{board}.tar.xz", Path(name), wanted)
        yield Path(name)


def replayed(records: Path, job: Job) -> dict[str, Any]:
    """Build the trees of a job's records, and return what is found in them, without sentences."""
    with rebuilt(records, job) as (traces, layouts):
        if job.asked == "diff":
            reference, test = traces
            report = diff(reference, test, paths=job.paths, layouts=layouts)
        else:
            report = check(open_trace(traces[0]), layouts)
    left_out = ("undeclared", "layout", "is_live")  # follow from what the jobs were asked
    data = {key: value for key, value in report_json(report).items() if key not in left_out}
    counts = {"lacks": bool(report.lacks), "alone": report.alone}
    found: dict[str, Any] = facts({**data, **counts})
    return found


@contextlib.contextmanager
def rebuilt(records: Path, job: Job) -> Iterator[tuple[list[Path], LayoutFile | None]]:
    """Give the trees of a job's records, and its layout file, in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        traces = [folder / f"{n}" for n in range(len(job.records))]
        for trace, record in zip(traces, job.records, strict=True):
            recover([records / record], trace)
        layouts = None
        if job.layout:
            (folder / "layout.toml").write_text(job.layout)
            layouts = LayoutFile.load(folder / "layout.toml")
        yield traces, layouts


def facts(found: Any) -> Any:
    """Return data of a report without its sentences, numbers with as many digits as count."""
    if isinstance(found, dict):
        kept = ((k, facts(v)) for k, v in found.items() if k not in SENTENCES)
        return {k: v for k, v in kept if not (isinstance(v, str) and " " in v)}
    if isinstance(found, list | tuple):
        return [facts(one) for one in found]
    if isinstance(found, float):
        is_number = math.isfinite(found)
        return float(f"{found:.{_DIGITS}g}") if is_number else str(found)
    return found


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield a line for everything in which two findings differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            there = f"{place}.{key}" if place else key
            yield from differences(before.get(key, "nothing"), now.get(key, "nothing"), there)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{place}[{number}]")
    elif before != now:
        yield f"{place} is {_short(now)}, was {_short(before)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(
            dict.fromkeys(str(v.get("kind", v)) if isinstance(v, dict) else str(v) for v in value)
        )
        return f"{len(value)} of them ({shown[:120]})"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
