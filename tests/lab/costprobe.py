"""One measurement of what rankscope costs, by its public surface alone: `tests.lab.cost` runs this
with the sources of two commits. Prints one JSON object of figures, each the less the better.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SMALL, STEPS, LAYERS = 64, 60, 12
WRONG_STEP = 30
PR_SET_CHILD_SUBREAPER = 36
BESIDE = (b"rankscope.companion", b"rankscope.gather", b"rankscope.stepwise")
"""Modules of the processes beside a job, in this version and in those before."""
COMMAND = [sys.executable, "-m", "rankscope"]
JOB = f"""
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear({SMALL}, {SMALL}) for _ in range({LAYERS})]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({STEPS}):
    optimizer.zero_grad()
    x = torch.randn(8, {SMALL})
    if step == {WRONG_STEP} and dist.get_rank() == 1:
        x[0, 0] = float("nan")
    model(x).square().mean().backward()
    optimizer.step()
    time.sleep(0.1)  # for the live check
dist.barrier()
dist.destroy_process_group()
"""


def step() -> dict[str, float]:
    """A step of one process, traced and plain by turns."""
    import torch

    import rankscope

    torch.manual_seed(0)
    layers = (torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(8))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 256)

    def seconds(steps: int) -> float:
        began = time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return time.process_time() - began

    seconds(20)
    plain = [seconds(20)]
    with tempfile.TemporaryDirectory() as folder:
        with rankscope.trace(out=Path(folder, "t"), steps="all"):
            seconds(10)
            traced = seconds(40) / 2
        plain.append(seconds(20))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "a traced step beside a plain one": traced / min(plain),
        "MB of a traced process": memory,
    }


def job() -> dict[str, float]:
    """Two ranks, from their records to the tree; then that tree made anew, opened and asked."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # processes beside the job end here
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, out = folder / "train.py", folder / "trace"
        script.write_text(JOB)
        settings = ["--rs-out", str(out), "--rs-steps", "all", "--rs-keep-spool"]
        used = _cost_of([*COMMAND, "run", *settings, "--nproc-per-node", "2", str(script)])
        lines = (out / "findings.jsonl").read_text().splitlines()
        found = next(one for one in map(json.loads, lines) if "step_ended" in one)
        records = sum(f.stat().st_size for f in (out / "spool").glob("*.cells"))
        recovered = _cost_of([*COMMAND, "recover", str(out), "--out", str(folder / "again")])
        shown = _cost_of([*COMMAND, "show", str(out), "--path", "3", "--rank", "1"])
    return {
        "CPU seconds beside the job for 10 MB of records": used["beside_s"] / records * 1e7,
        "MB of the largest process beside the job": used["beside_mb"],
        "seconds from the end of a step to its finding": _apart(found),
        "CPU seconds to make the tree of 10 MB of records": recovered["cpu_s"] / records * 1e7,
        "MB to make the tree": recovered["mb"],
        "CPU seconds to open a trace and show a node": shown["cpu_s"],
        "MB to show a node": shown["mb"],
    }


def _apart(found: dict[str, str]) -> float:
    from datetime import datetime

    ended, told = (datetime.fromisoformat(found[key]) for key in ("step_ended", "found"))
    return (told - ended).total_seconds()


def _cost_of(command: list[str]) -> dict[str, float]:
    """Run a command, and wait for all that it leaves behind; what processes beside the job used is
    as seen last, at most 50 ms before each ended."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    beside: dict[int, tuple[float, float]] = {}
    used = {"cpu_s": 0.0, "mb": 0.0}
    while True:
        for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError, IndexError):  # it has ended
                if any(m in Path(f"/proc/{pid}/cmdline").read_bytes() for m in BESIDE):
                    beside[pid] = _so_far(pid)
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            time.sleep(0.05)
            continue
        used["cpu_s"] += usage.ru_utime + usage.ru_stime
        used["mb"] = max(used["mb"], usage.ru_maxrss / 1024)
        if pid == process.pid and status:
            raise RuntimeError(process.stderr.read().decode()[-2000:] if process.stderr else "")
    used["beside_s"] = sum(seconds for seconds, _ in beside.values())
    used["beside_mb"] = max((mb for _, mb in beside.values()), default=0.0)
    return used


def _so_far(pid: int) -> tuple[float, float]:
    """Return CPU seconds and the most MB of a process that runs.

    Raises:
        OSError, IndexError: it has ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    high = Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(high) / 1024


PROBES: dict[str, Callable[[], dict[str, float]]] = {"step": step, "job": job}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
