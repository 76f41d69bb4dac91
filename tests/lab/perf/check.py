"""What a verdict on a large trace costs: prints figures, asserts nothing.

    python -m tests.lab.perf.check [--ranks 256] [--modules 2000] [--values 3]

The trace is made as in tests/lab/perf/assemble.py. It is judged in processes of their own: as it
is, with one rank that holds other values from the middle of the model on (one origin, thousands of
victims), and where every rank has numbers of its own. Last comes what `rankscope show` takes for
its screen, with the verdict and without.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankscope.cli import show
from rankscope.cli.app import main as cli
from rankscope.diagnosis.check import check
from rankscope.record.finding import Report
from rankscope.record.ranks import StreamId
from rankscope.tree.assembly.rankstreams import StreamBytes
from rankscope.tree.build import assemble, write_trace
from rankscope.tree.reader import open_trace
from rankscope.tree.stepfile import map_columns
from tests.lab.perf.assemble import rank_cells


def made_trace(
    folder: Path, ranks: int, modules: int, values: int, *, step: int = 0, are_replicas: bool = True
) -> Path:
    """Write a trace of one forward on all ranks into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for rank in range(ranks):
        path = folder / f"{rank}.cells"
        rank_cells(rank, ranks, modules, values, first_step=step, are_replicas=are_replicas).tofile(
            path
        )
        data = np.memmap(path, np.uint8, "r")
        sources.append(StreamBytes(stream=StreamId(rank=rank, incarnation=0), data=data))
    out = folder / "out"
    out.mkdir()
    write_trace(assemble(sources), out)
    return out


def spoil(trace: Path, rank: int) -> None:
    """Give one rank other hashes and sketches in the second half of the rows."""
    head = json.loads((trace / "trace.json").read_text())
    entries = [*head["setup"], *head["steps"]]
    half = sum(end - begin for begin, end in (each["rows"]["values"] for each in entries)) // 2
    before = 0
    for entry in entries:
        first, last = entry["rows"]["values"]
        ranks = map_columns(trace / entry["file"])["values.rank"][first:last]
        rows = np.flatnonzero(ranks == rank)
        _change(trace / entry["file"], first + rows[before + rows > half])
        before += last - first


def _change(path: Path, rows: NDArray[np.int64]) -> None:
    """Write other hashes and sketches over those of some values of a step file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r+", 8 + length)
    for name, dtype in (("hash", "<u8"), ("sketch", "<f8")):
        first, last = header[f"values.{name}"]["data_offsets"]
        column = data[first:last].view(dtype).reshape(header[f"values.{name}"]["shape"])
        column[rows] = column[rows] + 1
    data.flush()


def print_cost(judge: Callable[[], Report]) -> None:
    """Print what one verdict costs, in this process."""
    begin, wall = time.process_time(), time.monotonic()
    report = judge()
    used, waited = time.process_time() - begin, time.monotonic() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(
        f"{report.verdict.value:10s} {used:6.2f} s of one core, {waited:6.2f} s (load "
        f"{os.getloadavg()[0]:.1f}), peak {peak:.2f} GiB, {report.compared} of {report.recorded} "
        f"values, {len(report.origins)} origins, {sum(f.victims for f in report.origins)} victims"
    )


def print_screen(trace: Path) -> None:
    """Print what the screen of `rankscope show` costs beside the verdict on it."""
    for named, limit in (("with the verdict", None), ("without", -1)):
        if limit is not None:
            show._MOST_NODES_BYTES = limit
        begin = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            cli(["show", str(trace)])
        print(f"rankscope show, {named:16s} {time.process_time() - begin:6.2f} s of one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--values", type=int, default=3)
    parser.add_argument("--judge", type=Path, help="judge this trace alone")
    chosen = parser.parse_args()
    if chosen.judge:
        print_cost(lambda: check(open_trace(chosen.judge)))
        return
    folder = Path(tempfile.mkdtemp(prefix="rankscope-perf-"))
    try:
        shape = chosen.ranks, chosen.modules, chosen.values
        out = made_trace(folder / "alike", *shape)
        print(f"{shape[0]} ranks x {shape[1]} modules x {shape[2]} values", flush=True)
        judge = [sys.executable, "-m", "tests.lab.perf.check", "--judge"]
        subprocess.run([*judge, str(out)], check=True)
        spoil(out, chosen.ranks // 3)
        subprocess.run([*judge, str(out)], check=True)
        unlike = made_trace(folder / "unlike", *shape, are_replicas=False)
        subprocess.run([*judge, str(unlike)], check=True)
        print_screen(out)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
