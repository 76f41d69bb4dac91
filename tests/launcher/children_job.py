"""One rank that trains and starts every kind of child: none of them may trace, hang or harm.

children_job.py            everything, after the first step; "few": fewer kinds; "before": before it
children_job.py inner      what a child runs: it calls a module of its own
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

WORKER = torch.nn.Linear(3, 3)


class Encoded(Dataset[torch.Tensor]):
    """A data set whose workers run a module."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return WORKER(torch.full((3,), float(index)))


def work(number: float) -> float:
    return float(WORKER(torch.full((3,), number)).sum())


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    me = dist.get_rank() if dist.is_initialized() else 0
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    if "before" in sys.argv:
        children(me)
        step()
    else:
        step()
        children(me)
    step()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.write(f"trained {me}\n")  # in one write: print makes two where nothing is buffered
    sys.stdout.flush()


def children(me: int) -> None:
    is_quick = me or "few" in sys.argv
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(
            Encoded(), batch_size=2, num_workers=1, multiprocessing_context=method,
            persistent_workers=method == "fork",
        )  # fmt: skip
        assert sum(len(rows) for rows in loader) == 4
        if is_quick:
            break
    with multiprocessing.get_context("fork" if is_quick else "spawn").Pool(1) as pool:
        pool.map(work, [1.0])
    child = os.fork()
    if child == 0:
        work(2.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    if me == 0:
        script = str(Path(__file__).resolve())
        subprocess.run([sys.executable, script, "inner"], check=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        torchrun += ["1" if is_quick else "3"]
        subprocess.run([*torchrun, "--master-port", "0", script, "inner"], check=True)


if __name__ == "__main__":
    if "inner" in sys.argv:
        work(3.0)
    else:
        main()
