"""What recording a collective costs, in a group of one rank: gloo has nothing to wait for there.

    python -m tests.lab.perf.collectives [--rounds 15] [--calls 300]

Plain and traced steps alternate in one process. A step makes a number of synchronous calls in one
module; the figures are medians over rounds of CPU microseconds per call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import rankscope

Call = Callable[[torch.Tensor], object]


def reduced(value: torch.Tensor) -> object:
    return dist.all_reduce(value)


def functional(value: torch.Tensor) -> object:
    return funcol.wait_tensor(funcol.all_reduce(value, "sum", dist.group.WORLD))


class Calls(nn.Module):
    """Makes one call many times."""

    def __init__(self, call: Call, calls: int, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.call, self.calls = call, calls
        self.value = torch.zeros(elements)

    def forward(self) -> None:
        for _ in range(self.calls):
            self.call(self.value)


def microseconds(model: Calls) -> float:
    """Time one step, in CPU microseconds of this thread per call."""
    begin = time.thread_time()
    with torch.no_grad():
        model()
    return (time.thread_time() - begin) / model.calls * 1e6


def compare(name: str, call: Call, elements: int, rounds: int, calls: int) -> None:
    """Print what a call costs plain, and how much more under each setting."""
    model = Calls(call, calls, elements)
    kinds: dict[str, dict[str, object]] = {
        "whole digest": {"steps": "all"},
        "structure only": {"steps": "all", "digest": "none"},
        "without collectives": {"steps": "all", "phases": "forward,backward"},
        "step not traced": {"steps": "1000000"},
    }
    plain: list[float] = []
    extra: dict[str, list[float]] = {kind: [] for kind in kinds}
    microseconds(model)
    for _ in range(rounds):
        for kind, settings in kinds.items():
            before = microseconds(model)
            with (
                tempfile.TemporaryDirectory() as folder,
                rankscope.trace(out=Path(folder) / "trace", **settings),
            ):
                microseconds(model)  # opens the spool
                traced = microseconds(model)
            after = microseconds(model)
            plain += [before, after]
            extra[kind].append(traced - (before + after) / 2)
    print(f"{name}: {statistics.median(plain):.1f} us plain")
    for kind, found in extra.items():
        print(f"    {kind:20} {statistics.median(found):+7.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for elements in (64, 131_072):
            for call in (reduced, functional):
                name = f"{call.__name__}, {elements} float32"
                compare(name, call, elements, given.rounds, given.calls)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
