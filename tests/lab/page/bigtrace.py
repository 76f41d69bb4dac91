"""A trace as large as pages have to hold, made without ranks: prints what each part costs.

    python -m tests.lab.page.bigtrace OUT [--ranks 256] [--modules 2000] [--steps 10] [--values 1]

The records are those of tests/lab/perf/assemble.py. One rank holds other values from the middle of
the run on, as in tests/lab/perf/check.py.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from rankscope.diagnosis.check import check
from rankscope.record.ranks import StreamId
from rankscope.tree.assembly.rankstreams import StreamBytes
from rankscope.tree.build import assemble, write_trace
from rankscope.tree.reader import open_trace
from tests.lab.perf.assemble import peak_gib, rank_cells
from tests.lab.perf.check import spoil

__all__ = ["big_trace"]


def big_trace(out: Path, *, ranks: int, modules: int, steps: int, values: int = 1) -> Path:
    """Write a trace of so many ranks into the folder `out`; rank `ranks // 3` holds other values
    from the middle of the run on. Needs 1.5 GiB for a million values."""
    cells = Path(tempfile.mkdtemp(prefix="rankscope-cells-"))
    try:
        sources = []
        for rank in range(ranks):
            path = cells / f"{rank}.cells"
            rank_cells(rank, ranks, modules, values, steps=steps).tofile(path)
            data = np.memmap(path, np.uint8, "r")
            sources.append(StreamBytes(stream=StreamId(rank=rank, incarnation=0), data=data))
        out.mkdir(parents=True)
        write_trace(assemble(sources), out)
    finally:
        shutil.rmtree(cells)
    spoil(out, ranks // 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--values", type=int, default=1)
    chosen = parser.parse_args()
    begin = time.monotonic()
    big_trace(
        chosen.out,
        ranks=chosen.ranks,
        modules=chosen.modules,
        steps=chosen.steps,
        values=chosen.values,
    )
    print(f"made     {time.monotonic() - begin:6.1f} s, peak {peak_gib():.2f} GiB", flush=True)
    begin = time.monotonic()
    trace = open_trace(chosen.out)
    print(f"opened   {time.monotonic() - begin:6.1f} s, peak {peak_gib():.2f} GiB", flush=True)
    begin = time.monotonic()
    report = check(trace)
    print(f"checked  {time.monotonic() - begin:6.1f} s, peak {peak_gib():.2f} GiB", flush=True)
    print(f"{report.verdict.value}, {report.recorded} values, {len(report.origins)} origins")
    for path in sorted(chosen.out.rglob("*")):
        if path.is_file():
            print(f"{path.name} {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
