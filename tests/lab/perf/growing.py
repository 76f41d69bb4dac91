"""What a job costs whose tree grows while it runs: memory, disk, time at its end.

    python -m tests.lab.perf.growing [--steps 10000] [--ranks 2] [--svg FILE]
    python -m tests.lab.perf.growing --simulate 256 2000 [--period 10]

A small job traces every step. Each second the memory of its ranks, of the companion and
of its reader is read, and what spool and trace folder take on disk. Then the time from
the end of the last rank to the finished trace, and whether readers saw whole steps meanwhile.
With --simulate, what the reader takes for many ranks: records are made here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankscope.errors import RankscopeError
from rankscope.run.folders import SHARED, RunHeader, write_run_header
from rankscope.run.processes import reader_command
from rankscope.tree.reader import open_trace
from tests.lab.perf.assemble import rank_cells

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
out, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
x = torch.randn(64, 16)
for step in range(steps):
    model(x).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 0:
        open(out, "w").write(str(step))
dist.destroy_process_group()
if rank == 0:
    open(out, "w").write("over")
"""
LEGEND = {
    "ranks": "a rank (memory)",
    "companion": "companion (memory)",
    "reader": "its reader (memory)",
    "host spool": "spools (disk)",
    "records": "records (disk)",
}
ROLES = {
    "ranks": b"script.py",
    "reader": b"rankscope.companion.running\0",
    "companion": b"rankscope.companion\0",
}


def processes_of(folder: Path) -> Iterator[tuple[bytes, Path]]:
    """Yield the command line of each process of a job in a folder, and where /proc tells of it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in words and b"\0run\0" not in words:  # not the launcher
            yield words, process


def megabytes_of(folder: Path) -> dict[str, float]:
    """Return the resident memory of the largest process of each role, in MB."""
    found = dict.fromkeys(ROLES, 0.0)
    for words, process in processes_of(folder):
        role = next((role for role, mark in ROLES.items() if mark in words), None)
        if role is None:
            continue
        try:
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        found[role] = max(found[role], private / 1024)
    return found


def on_disk(folder: Path) -> float:
    """Return what a folder takes on disk, in MB."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total / 2**20


def plot(rows: Sequence[Mapping[str, float]], file: Path) -> None:
    """Draw what was read each second over the steps, as an SVG."""
    names = ["ranks", "companion", "reader", "host spool", "records"]
    colors = ["#4477aa", "#66ccee", "#228833", "#ee6677", "#aa3377", "#ccbb44"]
    last = -(-max(row["step"] for row in rows) // 100) * 100
    most = max(row[name] for row in rows for name in names)
    top = 50 * (int(most) // 50 + 1)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 330"',
             'font-family="sans-serif" font-size="12">',
             '<rect width="800" height="330" fill="#fff"/>']  # fmt: skip
    for megabytes in range(0, top + 1, 50):
        y = 290 - 260 * megabytes / top
        parts.append(f'<path d="M50 {y:.1f}H600" stroke="#ddd"/>')
        parts.append(f'<text x="44" y="{y + 4:.1f}" text-anchor="end">{megabytes}</text>')
    for fifth in range(6):
        x = 50 + 110 * fifth
        parts.append(f'<text x="{x}" y="308" text-anchor="middle">{last * fifth // 5:,}</text>')
    parts.append('<text x="325" y="325" text-anchor="middle">traced steps</text>')
    parts.append('<text x="8" y="16">MB</text>')
    for i, (name, color) in enumerate(zip(names, colors)):
        points = " ".join(
            f"{50 + 550 * row['step'] / last:.1f},{290 - 260 * row[name] / top:.1f}" for row in rows
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        parts.append(f'<text x="612" y="{50 + 20 * i}" fill="{color}">{LEGEND[name]}</text>')
    file.write_text("\n".join([*parts, "</svg>", ""]))


def simulate(ranks: int, modules: int, steps: int, period_s: float) -> None:
    """Print memory and lag of the reader of so many ranks, each of which writes
    one value a module. There are no ranks: their records are made here.
    """
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        (out / "spool").mkdir()
        header = RunHeader(
            run_id="growing", out=out, collector=SHARED, world_size=ranks, collects=ranks,
            settings={"live-check": "0"},
        )  # fmt: skip
        write_run_header(out, header)
        beside = subprocess.Popen(reader_command(out), cwd=out)
        made: dict[int, float] = {}
        lags: list[float] = []
        size = most = 0.0
        step = 0
        deadline = time.monotonic() + 600
        while len(lags) < steps - 2 and time.monotonic() < deadline:
            if step < steps and (not made or time.monotonic() - made[step - 1] >= period_s):
                for rank in range(ranks):
                    cells = rank_cells(
                        rank,
                        ranks,
                        modules,
                        1,
                        first_step=step,
                        are_replicas=False,
                        is_running=True,
                    )
                    with (out / f"spool/rank{rank:05d}.0.cells").open("ab") as file:
                        file.write(cells.tobytes())
                    size += cells.nbytes
                made[step] = time.monotonic()
                step += 1
            time.sleep(0.2)
            most = max(most, megabytes_of(out)["reader"])
            try:
                lines = (out / "steps/index.jsonl").read_text().splitlines()
            except FileNotFoundError:
                lines = []
            written = [head["step"] for line in lines for head in json.loads(line)["steps"]]
            for each in written[len(lags) :]:
                lags.append(time.monotonic() - made[each + 2])  # by then it is past
        beside.terminate()
        beside.wait()
        print(f"{ranks} ranks x {modules} modules: {size / step / 2**20:.0f} MB of records a step; "
              f"{len(lags)} of {steps} written, the last after {max(lags, default=0):.1f} s; "
              f"{most:.0f} MB resident; {on_disk(out / 'spool'):.0f} MB of records on disk, "
              f"{on_disk(out / 'steps') / max(1, len(lags)):.0f} MB of tree a step")  # fmt: skip


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--simulate", type=int, nargs=2, metavar=("RANKS", "MODULES"))
    parser.add_argument("--period", type=float, default=10.0, metavar="SECONDS")
    options = parser.parse_args()
    if options.simulate:
        simulate(*options.simulate, steps=10, period_s=options.period)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [Path(sys.executable).parent / "rankscope", "run", "--rs-out", folder / "trace"]
        command += ["--rs-spool", folder / "spool", "--rs-steps", "all", "--nproc-per-node"]
        command += [options.ranks, folder / "script.py", folder / "at", options.steps]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen([*map(str, command)], env=environment)
        rows, looked, torn, gone = [], 0, 0, 0.0
        while job.poll() is None:
            for _ in range(20):
                time.sleep(0.05)
                try:
                    step = (folder / "at").read_text()
                except OSError:
                    step = ""
                if step == "over":
                    break
            if not step:
                continue
            if step == "over":
                while not gone and job.poll() is None:
                    gone = 0.0 if megabytes_of(folder)["ranks"] else time.time()
                continue
            row = {"step": int(step or 0), **megabytes_of(folder)}
            row["host spool"] = on_disk(folder / "spool")
            row["records"] = on_disk(folder / "trace/spool")
            row["tree"] = on_disk(folder / "trace/steps")
            rows.append(row)
            if len(rows) % 20 == 0:
                try:
                    numbers = [step.step for step in open_trace(folder / "trace").steps]
                except RankscopeError as error:
                    print(error)
                    torn += 1
                    continue
                looked += 1
                torn += numbers != list(range(len(numbers)))
        ended = (folder / "trace/trace.json").stat().st_mtime - gone
        trace = open_trace(folder / "trace")
        print(f"{len(trace.steps)} steps, {trace.state}; from the last rank's end to the finished "
              f"trace {ended:.1f} s; {looked} readers meanwhile, {torn} saw a gap")  # fmt: skip
    names = [*rows[0]]
    print(" ".join(f"{each:>10}" for each in names))
    for row in rows[:: max(1, len(rows) // 20)]:
        print(" ".join(f"{row[each]:10.0f}" for each in names))
    if options.svg:
        plot([row for row in rows if row["step"]], options.svg)


if __name__ == "__main__":
    main()
