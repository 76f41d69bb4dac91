"""What it takes to know the optimizers of a process whose heap is large.

    python -m tests.lab.perf.optimizers [--objects 2000000] [--rounds 5]

A model is trained through flat copies, so that no optimizer holds its parameters. CPU seconds are
counted, in one process and in turn: a search for optimizers that were made before attaching, beside
one plain loop over all living objects; and traced steps with a large heap beside a small one.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import rankscope
from rankscope.agent.guard import Guard
from rankscope.agent.steps.optimizers import OptimizerSearch
from tests.models import Net

_STEPS = 8


def milliseconds(work: Callable[[], object]) -> float:
    """Return the CPU time some work takes."""
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e3


def search() -> bool:
    """Do what the first question of a session does where an optimizer was made before it."""
    optimizers = OptimizerSearch(Guard(lambda error: None))
    optimizers.install()
    found = optimizers.exists()
    optimizers.uninstall()
    return found


def loop() -> list[object]:
    """Ask every living object for its class."""
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]


def traced_steps() -> float:
    """Return the mean of traced steps in which no optimizer holds a parameter of the model."""
    model = Net()
    flat = torch.zeros(8)
    optimizer = torch.optim.SGD([flat], lr=0.1)
    took = []

    def step() -> None:
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        model.zero_grad()

    with (
        tempfile.TemporaryDirectory() as folder,
        rankscope.trace(out=Path(folder) / "trace", steps="all"),
    ):
        for _ in range(_STEPS):
            took.append(milliseconds(step))
    return statistics.fmean(took[1:])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--objects", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    earlier = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    small = [traced_steps() for _ in range(options.rounds)]
    ballast = [[number] for number in range(options.objects)]
    gc.collect()
    large = [traced_steps() for _ in range(options.rounds)]
    searches = [(milliseconds(search), milliseconds(loop)) for _ in range(options.rounds)]
    once, loops = (statistics.median(column) for column in zip(*searches, strict=True))
    few, many = statistics.median(small), statistics.median(large)
    print(f"living objects: {len(gc.get_objects()):,}")
    print(f"search, once a session: {once:.0f} ms; a loop over all objects: {loops:.0f} ms")
    print(f"traced step: {few:.2f} ms, with the objects alive {many:.2f} ms, {many / few:.2f}x")
    del earlier, ballast


if __name__ == "__main__":
    main()
