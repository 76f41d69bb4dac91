"""What a job of many ranks costs the hosts that gather it: intake, latency, memory, disk, the tree.

    python -m tests.lab.perf.scale [--ranks 64 256 1024] [--modules 2000] [--steps 4] [--digests]
        [--ranks-a-host 8]

Ranks without torch: each has a spool, and writes the records of a step into it by the writer that
real ranks use. Eight ranks make a host, with a real relay; one real collector takes them all, over
`ipc://`. All of them share this machine's cores, so look at CPU time: a host of its own has each
relay. The records of a call are two (its begin and its end), with --digests three: a value too.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.folders import (
    RunHeader,
    host_run_folder,
    mark_job_over,
    run_key,
    spool_base,
    stream_folder,
    write_run_header,
)
from rankscope.run.processes import companion_command, companion_environment
from rankscope.spool.recordformat import (
    ENTER,
    EXIT,
    NO_SEQUENCE,
    STEP,
    VALUE,
    RecordKind,
    StepEvent,
)
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.reader import open_trace
from tests.companion.jobs import collector_command

WRITERS = 2
SPOOL_BYTES = 8 << 20
MOST_S = 900.0


# ------------------------------------------------------------------ ranks
def definitions(rank: int, ranks: int, modules: int) -> list[dict[str, Any]]:
    """What a rank says before its first call."""
    return [
        {
            "kind": "rank", "format": 1, "run_id": "scale", "rank": rank, "world_size": ranks,
            "local_rank": rank % 8, "local_world_size": 8, "incarnation": 0,
            "host": f"h{rank // 8}", "pid": 1, "wall_ns": 10**18, "monotonic_ns": 0,
        },
        {"kind": "root", "class": "Model", "parameters": 10**9, "has_parameters": True},
        {
            "kind": "meta", "dtype": "bfloat16", "device": "cuda:0", "shape": [4, 64, 512],
            "source": "tensor", "requires_grad": True, "note": None,
        },
        {"kind": "slot", "name": "output"},
        *(
            {
                "kind": "module", "root": 2, "path": path, "raw_path": path, "class": "Linear",
                "wrappers": [], "opaque": False,
            }
            for path in ("", *(f"layers.{m // 20}.part{m}" for m in range(1, modules)))
        ),
    ]  # fmt: skip


def write(folders: Sequence[str], ranks: int, modules: int, *, has_digests: bool) -> None:
    """Play some ranks: a step for each line read, told on stdout once it is written."""
    writers = []
    for folder in map(Path, folders):
        rank = int(folder.name[4:].partition(".")[0])
        writer = SpoolWriter(folder, limit_bytes=SPOOL_BYTES, segment_bytes=SPOOL_BYTES // 8)
        for number, each in enumerate(definitions(rank, ranks, modules), 1):
            writer.define(msgpack.packb({"id": number, **each}))
        writers.append((rank, writer))
    print("ready", flush=True)
    for line in sys.stdin:
        step = int(line)
        first = step * modules
        for rank, writer in writers:
            began = time.monotonic_ns()
            writer.write(RecordKind.STEP, STEP.pack(began, step, 0, StepEvent.BEGIN, 0))
            for call in range(first, first + modules):
                module, parent = 5 + call - first, NO_SEQUENCE if call == first else first
                writer.write(
                    RecordKind.ENTER,
                    ENTER.pack(call, parent, began + call, module, step, 0, 0, 1, 0, 0, 2, 0, 0),
                )
                if has_digests:
                    numbers = (0, 0, 0, 0, *(rank * 0.001 + call + n for n in range(13)))
                    head = (call, began + call, 4, 3, 0, 1, 0, 131072, hash((rank, call)) & MASK, 0)
                    writer.write(RecordKind.VALUE, VALUE.pack(*head, *numbers))
                writer.write(RecordKind.EXIT, EXIT.pack(call, began + call + 9, 0, 0, 0))
            writer.write(RecordKind.STEP, STEP.pack(time.monotonic_ns(), step, 0, StepEvent.END, 0))
        print(sum(writer.committed_bytes for _, writer in writers), flush=True)
    for _, writer in writers:
        writer.close(EndReason.EXIT)
    print(sum(writer.dropped_records for _, writer in writers), flush=True)


MASK = (1 << 62) - 1


# ------------------------------------------------------------------ what processes take
def occupied(pid: int, name: str = "VmRSS") -> float:
    """Return MB of memory of a process, 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), 0.0)


def cpu_s(pid: int) -> float:
    """Return seconds of processor time of a process, without its children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one size took."""

    ranks: int
    megabytes: float
    records: float
    wall_s: float
    """From the first record of the steps to the last byte in the replicas."""
    behind_s: float
    """From the last record of a step to its last byte in the replicas, the longest of the steps."""
    collector_s: float
    """Processor time of the collector for that."""
    relays_s: float
    """Of all relays."""
    relays: int
    collector_mb: float
    relay_mb: float
    """The largest of them."""
    tree_s: float
    tree_mb: float
    """The most memory that the collector took until the tree was built."""
    tree_bytes: float
    """MB on disk."""


@contextmanager
def job(
    base: Path, ranks: int, ranks_a_host: int
) -> Iterator[tuple[subprocess.Popen[bytes], list[Any], list[Path]]]:
    """Start a collector and the relays; yield them and the run folders of the hosts."""
    out, address = base / "out", f"ipc://{base}/c.sock"
    options = {"live_check": False, "keep_spool": True, "drain_seconds": 120.0}
    with ExitStack() as ending:

        def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
            with (base / "log").open("ab") as log:
                made = subprocess.Popen(
                    command, env=companion_environment(), stdin=subprocess.DEVNULL, stderr=log
                )
            ending.callback(made.wait)
            ending.callback(made.kill)
            return made

        collector = start(collector_command(out, address, ranks, **options))
        hosts = []
        for host in range(-(-ranks // ranks_a_host)):
            hosts.append(host_run_folder(spool_base(base / f"h{host}"), run_key("scale")))
            header = RunHeader(run_id="scale", out=out, collector=address, world_size=ranks)
            write_run_header(hosts[-1], header)
        yield collector, [start(companion_command(host)) for host in hosts], hosts


def measure(ranks: int, modules: int, steps: int, *, has_digests: bool, ranks_a_host: int) -> Row:
    """Gather a job of so many ranks."""
    base = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        with job(base, ranks, ranks_a_host) as (collector, relays, hosts):
            return _gathered(
                base, collector, relays, hosts, (ranks, modules, steps), has_digests=has_digests
            )
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _gathered(
    base: Path,
    collector: subprocess.Popen[bytes],
    relays: Sequence[subprocess.Popen[bytes]],
    hosts: Sequence[Path],
    size: tuple[int, int, int],
    *,
    has_digests: bool,
) -> Row:
    ranks, modules, steps = size
    folders = [
        str(stream_folder(hosts[rank * len(hosts) // ranks], StreamId(rank=rank, incarnation=0)))
        for rank in range(ranks)
    ]
    playing = []
    for number in range(WRITERS):
        words = [sys.executable, "-m", "tests.lab.perf.scale", "--write", *folders[number::WRITERS]]
        words += ["--ranks", str(ranks), "--modules", str(modules)]
        words += ["--digests"] * has_digests
        playing.append(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    for one in playing:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    replicas = base / "out" / "spool"

    def here() -> int:
        return sum(f.stat().st_size for f in os.scandir(replicas) if f.name.endswith(".cells"))

    deadline = time.monotonic() + MOST_S
    seen = -1
    while not replicas.is_dir() or seen != (seen := here()) or not seen:  # what was there before
        if time.monotonic() > deadline:
            raise TimeoutError("the definitions did not arrive")
        time.sleep(2.0)
    before, began = seen, time.monotonic()
    spent = [cpu_s(collector.pid), sum(cpu_s(one.pid) for one in relays)]
    most = [0.0, 0.0]
    behind = 0.0
    for step in range(steps):
        for one in playing:
            assert one.stdin is not None
            one.stdin.write(f"{step}\n")
            one.stdin.flush()
        committed = sum(int(one.stdout.readline()) for one in playing if one.stdout is not None)
        written = time.monotonic()
        while here() < committed:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{here()} of {committed} bytes after {MOST_S} s")
            time.sleep(0.02)
        behind = max(behind, time.monotonic() - written)
        most[0] = max(most[0], occupied(collector.pid))
        most[1] = max(most[1], *(occupied(one.pid) for one in relays))
    wall = time.monotonic() - began
    spent = [cpu_s(collector.pid) - spent[0], sum(cpu_s(one.pid) for one in relays) - spent[1]]
    megabytes = (here() - before) / 1e6
    for one in playing:
        assert one.stdin is not None and one.stdout is not None
        one.stdin.close()
        assert one.stdout.readline() == "0\n", "records were dropped"
        one.wait()
    for host in hosts:
        mark_job_over(host)
    ended, tree_mb = time.monotonic(), 0.0
    while collector.poll() is None and time.monotonic() < deadline:
        tree_mb = max(tree_mb, occupied(collector.pid, "VmHWM"))
        time.sleep(0.05)
    tree_s = time.monotonic() - ended
    trace = open_trace(base / "out")
    assert trace.is_complete and len(trace.steps) == steps, (base / "log").read_text()[-2000:]
    files = [f for f in (base / "out").rglob("*") if f.is_file() and f.parent.name != "spool"]
    return Row(
        ranks=ranks,
        megabytes=megabytes,
        records=ranks * modules * steps * (3 if has_digests else 2),
        wall_s=wall,
        behind_s=behind,
        collector_s=spent[0],
        relays_s=spent[1],
        relays=len(relays),
        collector_mb=most[0],
        relay_mb=most[1],
        tree_s=tree_s,
        tree_mb=tree_mb,
        tree_bytes=sum(f.stat().st_size for f in files) / 1e6,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table for the docs."""
    lines = [
        "| ranks | records, MB | to the replicas | behind | the collector's CPU | a relay's CPU | "
        "collector, relay MB | the tree: time, MB of memory, MB on disk |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        million = row.records / 1e6
        lines.append(
            f"| {row.ranks:,} | {million:.1f} M, {row.megabytes:.0f} | {row.wall_s:.1f} s "
            f"| {row.behind_s:.1f} s | {row.collector_s:.1f} s: "
            f"{row.records / row.collector_s / 1e6:.1f} M records/s, "
            f"{row.megabytes / row.collector_s:.0f} MB/s | {row.relays_s / row.relays:.2f} s "
            f"| {row.collector_mb:.0f}, {row.relay_mb:.0f} "
            f"| {row.tree_s:.1f} s ({row.records / row.tree_s / 1e6:.2f} M records/s), "
            f"{row.tree_mb:.0f}, {row.tree_bytes:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--digests", action="store_true")
    parser.add_argument("--ranks-a-host", type=int, default=8)
    parser.add_argument("--write", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.write:
        (ranks,) = options.ranks
        write(options.write, ranks, options.modules, has_digests=options.digests)
        return
    rows = []
    for ranks in options.ranks:
        rows.append(
            measure(
                ranks,
                options.modules,
                options.steps,
                has_digests=options.digests,
                ranks_a_host=options.ranks_a_host,
            )
        )
        print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
