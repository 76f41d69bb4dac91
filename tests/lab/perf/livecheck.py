"""What the live check costs the job beside it, how late it is, and what it holds.

    python -m tests.lab.perf.livecheck [--rounds 5] [--seconds 20] [--memory 3000]

Jobs of two ranks, of which each 10th step is traced, run with it and without in turns; each times
its steps by itself, from 6 s on: by then the live check is at work. Then one job traces so many
steps, while the memory of the live check is read.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
out, size, depth, seconds, steps, drift = sys.argv[1], *map(float, sys.argv[2:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(int(size), int(size)) for _ in range(int(depth))))
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
x = torch.randn(64, int(size))
began, timed, wall, step = time.perf_counter(), 0, 0.0, 0
while True:
    over = torch.tensor([float(time.perf_counter() - began > seconds and step >= steps)])
    dist.all_reduce(over)
    if over.item():
        break
    if step == int(drift) and rank:
        with torch.no_grad():
            model[1].weight[0, 0] += 0.5
    start = time.perf_counter()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if time.perf_counter() - began > 6:
        timed, wall = timed + 1, wall + time.perf_counter() - start
    step += 1
if rank == 0:
    with open(out, "w") as file:
        json.dump(wall / max(timed, 1), file)
dist.destroy_process_group()
"""


def start(folder: Path, *words: object, options: tuple[object, ...]) -> subprocess.Popen[bytes]:
    """Start one job."""
    (folder / "script.py").write_text(SCRIPT)
    command = [Path(sys.executable).parent / "rankscope", "run", "--rs-out", folder / "trace"]
    command += ["--rs-spool", folder / "spool", *options, "--nproc-per-node", 2]
    command += [folder / "script.py", folder / "took", *words]
    return subprocess.Popen(
        [*map(str, command)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )


def step_seconds(size: int, depth: int, seconds: int, live: str) -> float:
    """Run one job; return what its steps took."""
    with tempfile.TemporaryDirectory() as name:
        options = ("--rs-steps", "every:10", "--rs-live-check", live)
        start(Path(name), size, depth, seconds, 0, -1, options=options).wait(600)
        return float(json.loads((Path(name) / "took").read_text()))


def lateness(size: int, depth: int) -> float:
    """Return the seconds from the end of a step with a fault to its line in findings.jsonl."""
    with tempfile.TemporaryDirectory() as name:
        options = ("--rs-steps", "every:10")
        start(Path(name), size, depth, 12, 301, 300, options=options).wait(600)
        line = json.loads((Path(name) / "trace/findings.jsonl").read_text().splitlines()[0])
        found, ended = (datetime.datetime.fromisoformat(line[n]) for n in ("found", "step_ended"))
        assert line["step"] == 300, line["text"]
        return (found - ended).total_seconds()


def memory(steps: int) -> list[tuple[int, float]]:
    """Run one job that traces every step; return (records in MB, MB of the live check) over it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = start(folder, 16, 4, 0, steps, -1, options=("--rs-steps", "all"))
        seen: list[tuple[int, float]] = []
        while job.poll() is None:
            time.sleep(1.0)
            size = sum(p.stat().st_size for p in folder.glob("trace/spool/*.cells"))
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    words = (process / "cmdline").read_bytes()
                    if b"rankscope.companion.running" in words and name.encode() in words:
                        pages = int((process / "statm").read_text().split()[1])
                        seen.append((size >> 20, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
                except OSError:
                    continue
        return seen


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--memory", type=int, default=3000, metavar="STEPS")
    options = parser.parse_args()
    for size, depth in ((512, 8), (32, 8)):
        ratios = []
        for turn in range(options.rounds):
            ways = ("1", "0") if turn % 2 else ("0", "1")
            took = {way: step_seconds(size, depth, options.seconds, way) for way in ways}
            ratios.append(took["1"] / took["0"])
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        told = lateness(size, depth)
        print(f"{depth} layers of {size}: step with / without {statistics.median(ratios):.3f}"
              f" ({spread}), told {told:.2f} s after the step", flush=True)  # fmt: skip
    for size, used in memory(options.memory)[::5]:
        print(f"{size} MB of records: {used:.0f} MB")


if __name__ == "__main__":
    main()
