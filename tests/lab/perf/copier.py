"""How long copying waits while the process that reads and judges is killed, stopped, or has no
memory left.

    python -m tests.lab.perf.copier [SECONDS]

Two ranks write without a pause. The longest time in which a replica does not grow is what the
copier was away, and what the ranks and the machine's load add to that: the first row has nothing
but these.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rankscope.run.folders import REPLICA_FOLDER
from tests.lab.soak.faults import starve
from tests.launcher.launches import Launch
from tests.waiting import wait_until

SCRIPT = """
import pathlib, sys, torch
folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)], torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.001)
while not (folder / "leave").exists():
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_LOOK_S = 0.002
_RANKS = 2


def longest_wait(folder: Path, seconds: float, during: Callable[[], object]) -> float:
    """Return the longest time for which no replica grew, while something is done all the time."""
    replicas = [*(folder / REPLICA_FOLDER).glob("*.cells")]
    until = time.monotonic() + seconds
    size, grown_at, longest = 0, time.monotonic(), 0.0
    done_at = 0.0
    while (now := time.monotonic()) < until:
        if now - done_at > 0.5:
            during()
            done_at = time.monotonic()
        found = sum(replica.stat().st_size for replica in replicas)
        now = time.monotonic()
        longest = max(longest, now - grown_at)
        if found > size:
            size, grown_at = found, now
        time.sleep(_LOOK_S)
    return longest


def main(seconds: float) -> None:
    """Print the longest wait beside each fault."""
    rng = random.Random(0)

    def readers() -> list[int]:
        return [pid for pid in [job.beside()] if pid]

    def send(number: int) -> Callable[[], object]:
        return lambda: [os.kill(pid, number) for pid in readers()]

    for name, during in (
        ("untouched", lambda: None),
        ("stopped", send(signal.SIGSTOP)),
        ("out of memory", lambda: [starve(pid, rng) for pid in readers()]),
        ("killed", send(signal.SIGKILL)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            job = Launch(
                Path(folder) / "job", [""] * _RANKS, "--rs-steps", "all",
                script=SCRIPT,
            )  # fmt: skip
            try:
                assert wait_until(readers, 60), job.err
                gap = longest_wait(job.out, seconds, during)
                print(f"reader {name:<14} longest wait of the copier {gap * 1e3:5.0f} ms")
                send(signal.SIGCONT)()
                (job.meeting / "leave").touch()
                code = job.wait()
                assert code == 0, job.logs
            finally:
                job.stop()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 8.0)
