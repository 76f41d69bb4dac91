"""What holding one large trace to another costs: prints figures, asserts nothing.

    python -m tests.lab.perf.diff [--ranks 256] [--modules 2000] [--values 3]

Both traces are made as in tests/lab/perf/check.py. They are compared in processes of their own: as
they are, with one rank of the second that holds other values from the middle of the model on, and
where every rank has numbers of its own, the same in both.
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
        shape = chosen.ranks, chosen.modules, chosen.values
        print(f"{shape[0]} ranks x {shape[1]} modules x {shape[2]} values", flush=True)
        judge = [sys.executable, "-m", "tests.lab.perf.diff", "--judge"]
        for are_replicas in (True, False):
            traces = [
                made_trace(folder / f"{name}-{are_replicas}", *shape, are_replicas=are_replicas)
                for name in ("ref", "test")
            ]
            subprocess.run([*judge, *map(str, traces)], check=True)
            if are_replicas:
                spoil(traces[1], chosen.ranks // 3)
                subprocess.run([*judge, *map(str, traces)], check=True)
            for trace in traces:
                shutil.rmtree(trace.parent)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
