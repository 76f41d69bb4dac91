"""What holding one large trace to another costs: prints figures, asserts nothing.

    python -m tests.lab.perf.diff [--ranks 256] [--modules 2000] [--values 3]

Both traces are made as in tests/lab/perf/check.py; the second has one rank that holds other values
from the middle of the model on. They are compared in a process of their own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rankscope.diagnosis.comparison.diff import diff
from rankscope.tree.reader import open_trace
from tests.lab.perf.check import made_trace, print_cost, spoil


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--values", type=int, default=3)
    parser.add_argument("--judge", type=Path, nargs=2, help="compare these traces alone")
    chosen = parser.parse_args()
    if chosen.judge:
        ref, test = chosen.judge
        print_cost(lambda: diff(open_trace(ref), open_trace(test)))
        return
    folder = Path(tempfile.mkdtemp(prefix="rankscope-perf-"))
    try:
        traces = []
        for name in ("ref", "test"):
            (folder / name).mkdir()
            traces.append(made_trace(folder / name, chosen.ranks, chosen.modules, chosen.values))
        print(f"{chosen.ranks} ranks x {chosen.modules} modules x {chosen.values} values")
        again = [sys.executable, "-m", "tests.lab.perf.diff", "--judge", *map(str, traces)]
        subprocess.run(again, check=True)
        spoil(traces[1], chosen.ranks // 3)
        subprocess.run(again, check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
