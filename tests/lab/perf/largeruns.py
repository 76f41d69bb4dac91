"""What questions to a large Parquet dataset cost: prints figures, asserts nothing.

    python -m tests.lab.perf.largeruns [--ranks 1024] [--modules 1000] [--values 2] [--steps 5]

Makes a trace of each step as tests/lab/perf/check.py does, but with numbers of its own on every
rank, adds it to a dataset with the writer of `rankscope export`, and asks DuckDB and Spark (where
they are installed), each in a process of its own: a first time, and the median of three more.
`--keep FOLDER` leaves the dataset there; `--ask FOLDER` asks a dataset that is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rankscope.export.parquet import write_step
from rankscope.tree.reader import open_trace
from tests.lab.perf.check import made_trace

QUERIES = {
    "spread over the ranks, every module, one step": "select path, slot, min(l2), max(l2), "
    "count(distinct hash) from trace_values where step = 1 group by path, slot",
    "one module, all ranks and steps": "select step, rank, mean, l2 from trace_values "
    "where path = 'layers.3.part71' and slot = 'output.0'",
    "one rank, one step": "select path, slot, mean, l2 from trace_values "
    "where step = 1 and rank = 513",
    "where a value is not finite": "select step, path, slot, min(rank) from trace_values "
    "where nan > 0 group by step, path, slot order by min(time_ns)",
    "replicas, every module and step": "select step, path, slot, placement, count(distinct hash) "
    "as different from trace_values group by step, path, slot, placement "
    "order by different desc limit 10",
    "slowest rank of every module": "select path, max_by(rank, ms), max(ms), median(ms) from "
    "(select path, rank, sum(duration_ns) / 1e6 as ms from trace_calls group by path, rank) "
    "group by path order by max(ms) - median(ms) desc limit 10",
}
ENGINES = ("duckdb", "pyspark")
TABLES = ("values", "calls")


def duckdb_asks(folder: Path) -> Callable[[str], int]:
    import duckdb

    engine = duckdb.connect(config={"threads": 2})
    for table in TABLES:
        engine.sql(f"create view trace_{table} as from '{folder}/{table}/*.parquet'")
    return lambda query: len(engine.sql(query).fetchall())


def pyspark_asks(folder: Path) -> Callable[[str], int]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    engine = builder.config("spark.sql.shuffle.partitions", "4").getOrCreate()
    engine.sparkContext.setLogLevel("ERROR")
    for table in TABLES:
        engine.read.parquet(f"{folder}/{table}").createOrReplaceTempView(f"trace_{table}")
    return lambda query: len(engine.sql(query).collect())


def peak_mb() -> float:
    """Return the most memory of this process and of its children, which are Spark's Java. (What
    getrusage says, a process has from the one that started it.)"""
    children = [each.read_text() for each in Path("/proc/self/task").glob("*/children")]
    status = (Path(f"/proc/{pid}/status") for pid in ["self", *" ".join(children).split()])
    lines = (line for file in status for line in file.read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def ask(name: str, folder: Path) -> None:
    """Print what each query costs in one engine."""
    begin = time.monotonic()
    asks = {"duckdb": duckdb_asks, "pyspark": pyspark_asks}[name](folder)
    print(f"{name}: started in {time.monotonic() - begin:.2f} s")
    for what, query in QUERIES.items():
        taken = []
        for _ in range(4):
            begin = time.monotonic()
            rows = asks(query)
            taken.append(time.monotonic() - begin)
        first, again = taken[0], statistics.median(taken[1:])
        print(f"  {what:46s} first {first:6.2f} s  again {again:6.2f} s  {rows} rows")
    print(f"  peak memory {peak_mb():.0f} MB", flush=True)


def again(*words: object) -> None:
    """Run this program in a process of its own."""
    subprocess.run([sys.executable, "-m", "tests.lab.perf.largeruns", *map(str, words)], check=True)


def add_step(trace_folder: Path, folder: Path) -> None:
    """Add the step of a trace to a dataset; print what that costs in this process."""
    begin = time.process_time()
    trace = open_trace(trace_folder)
    rows = write_step(trace, trace.steps[0], folder)
    taken = time.process_time() - begin
    mapped = sum(path.stat().st_size for path in (trace_folder / "steps").iterdir()) / 1e6
    print(
        f"step {trace.steps[0].step}: {rows.values} values, {rows.calls} calls in {taken:.1f} s of "
        f"one core, {taken / rows.values * 1e6:.1f} us a value; peak {peak_mb():.0f} MB with the "
        f"{mapped:.0f} MB of the trace's columns, which are mapped",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--values", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="leave the dataset in this folder")
    parser.add_argument("--ask", type=Path, help="ask a dataset that is there")
    parser.add_argument("--engine", choices=ENGINES, help="ask this engine, in this process")
    parser.add_argument("--add", type=Path, help="add the step of this trace, in this process")
    chosen = parser.parse_args()
    if chosen.add:
        add_step(chosen.add, chosen.ask)
        return
    if chosen.engine:
        ask(chosen.engine, chosen.ask)
        return
    made = chosen.ask or chosen.keep or Path(tempfile.mkdtemp(prefix="rankscope-perf-"))
    try:
        if not chosen.ask:
            for step in range(chosen.steps):
                with tempfile.TemporaryDirectory(prefix="rankscope-perf-") as scratch:
                    sizes = chosen.ranks, chosen.modules, chosen.values
                    out = made_trace(Path(scratch), *sizes, step=step, are_replicas=False)
                    again("--add", out, "--ask", made)
        size = sum(file.stat().st_size for file in made.rglob("*.parquet"))
        print(f"{size / 1e6:.0f} MB in {len([*made.rglob('*.parquet')])} files")
        for name in ENGINES:
            if importlib.util.find_spec(name) is None:
                print(f"{name} is not installed")
                continue
            again("--engine", name, "--ask", made)
    finally:
        if not (chosen.ask or chosen.keep):
            shutil.rmtree(made)


if __name__ == "__main__":
    main()
