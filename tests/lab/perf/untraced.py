"""What a step costs that is not traced, in a process that traces others.

    python -m tests.lab.perf.untraced [--rounds 15] [--steps 100]

Plain and armed steps alternate in short rounds of one process; the figures are medians over the
rounds, of ratios and of microseconds between them. CPU seconds are counted, one thread runs: what
else the machine does weighs less.
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
from torch import nn

import rankscope

Step = Callable[[], None]


def training(width: int, depth: int) -> Step:
    """Return one training step of a stack of linear layers."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def seconds(step: Step, steps: int) -> float:
    """Time some steps."""
    begin = time.process_time()
    for _ in range(steps):
        step()
    return time.process_time() - begin


def compare(name: str, step: Step, selection: str, rounds: int, steps: int) -> None:
    """Print how armed steps compare to plain ones that ran just before and just after."""
    ratios, extra = [], []
    seconds(step, steps)
    for _ in range(rounds):
        before = seconds(step, steps)
        with (
            tempfile.TemporaryDirectory() as folder,
            rankscope.trace(out=Path(folder) / "trace", steps=selection),
        ):
            seconds(step, 3)  # the first root call opens the spool
            armed = seconds(step, steps)
        plain = (before + seconds(step, steps)) / 2
        ratios.append(armed / plain)
        extra.append((armed - plain) / steps * 1e6)
    low, ratio, high = statistics.quantiles(ratios, n=4)
    took = f"{statistics.median(extra):+.1f}"
    print(
        f"| {name} | `{selection.split('/')[0]}` | {ratio:.3f} | {low:.3f} to {high:.3f} | {took} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | steps | ratio to plain | quartiles | µs a step |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for width, depth in ((16, 4), (256, 12)):
            step = training(width, depth)
            for selection in ("100000", "every:100000,0", f"at:{folder}/now"):
                compare(f"{depth} x {width}", step, selection, options.rounds, options.steps)


if __name__ == "__main__":
    main()
