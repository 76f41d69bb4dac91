"""What holding one large trace to another costs: prints figures, asserts nothing.

    python -m tests.perf.diff [--ranks 256] [--modules 2000] [--values 3]

Both traces are made as in tests/perf/check.py; the second has one rank that holds other values from
the middle of the model on. They are compared in a process of their own.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rankscope.diagnosis.comparison.diff import diff
from rankscope.tree.reader import open_trace
from tests.perf.check import made_trace, spoil


def judge(ref: Path, test: Path) -> None:
    """Print what one comparison costs, in this process."""
    begin, wall = time.process_time(), time.monotonic()
    report = diff(open_trace(ref), open_trace(test))
    used, waited = time.process_time() - begin, time.monotonic() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(
        f"{report.verdict.value:10s} {used:6.2f} s of one core, {waited:6.2f} s, peak {peak:.2f} "
        f"GiB, {report.compared} of {report.recorded} values, {len(report.origins)} origins, "
        f"{sum(f.victims for f in report.origins)} victims"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--values", type=int, default=3)
    parser.add_argument("--judge", type=Path, nargs=2, help="compare these traces alone")
    chosen = parser.parse_args()
    if chosen.judge:
        judge(*chosen.judge)
        return
    folder = Path(tempfile.mkdtemp(prefix="rankscope-perf-"))
    try:
        traces = []
        for name in ("ref", "test"):
            (folder / name).mkdir()
            traces.append(made_trace(folder / name, chosen.ranks, chosen.modules, chosen.values))
        print(f"{chosen.ranks} ranks x {chosen.modules} modules x {chosen.values} values")
        again = [sys.executable, "-m", "tests.perf.diff", "--judge", *map(str, traces)]
        subprocess.run(again, check=True)
        spoil(traces[1], chosen.ranks // 3)
        subprocess.run(again, check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
