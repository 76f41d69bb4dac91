"""What a black box costs: `--rs-steps last:20` beside a job of which no step is traced, and beside
one of which all are; and what it costs to watch one value, or every value, besides.

    python -m tests.lab.perf.blackbox [--rounds 7] [--steps 60]

Jobs of one rank take turns, one after the other, each with its own relay and collector; every job
times its steps by itself, after ten that are left out. The figures are medians over the rounds, of
ratios between jobs of one round, of wall time and of the rank's own CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = {
    "none": "999999999",
    "last:20": "last:20",
    "all": "all",
    "one": "last:20,watch:1:output",
    "every": "last:20,watch:**",
}
SCRIPT = """
import json, sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
size, depth, steps = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
layer = torch.nn.TransformerEncoderLayer(size, 4, 4 * size, dropout=0.0, batch_first=True)
model = torch.nn.Sequential(
    torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False),
    torch.nn.Linear(size, size),
)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
x = torch.randn(4, 64, size)
def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(10):
    step()
wall, cpu = time.perf_counter(), time.process_time()
for _ in range(steps):
    step()
took = [(time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps]
with open(sys.argv[1], "w") as file:
    json.dump(took, file)
"""


def seconds(selection: str, size: int, depth: int, steps: int) -> tuple[float, float]:
    """Run one job; return wall and CPU seconds of a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [Path(sys.executable).parent / "rankscope", "run", "--rs-steps", selection]
        command += ["--rs-out", folder / "trace", "--rs-spool", folder / "spool"]
        command += ["--nproc-per-node", 1, folder / "script.py", folder / "took"]
        subprocess.run(
            [*map(str, command), str(size), str(depth), str(steps)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=600,
            check=True,
        )
        wall, cpu = json.loads((folder / "took").read_text())
        return float(wall), float(cpu)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(
        "| model | ms a step, none traced | wall, last:20 / none | CPU, last:20 / none "
        "| wall, last:20 / all | CPU, last:20 / all | CPU, one watched / last:20 "
        "| CPU, all watched / last:20 |\n|---|---|---|---|---|---|---|---|"
    )
    for size, depth in ((64, 4), (256, 4)):
        rounds: list[dict[str, tuple[float, float]]] = []
        for number in range(options.rounds):
            ways = [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]
            rounds.append({way: seconds(WAYS[way], size, depth, options.steps) for way in ways})
        plain = statistics.median(each["none"][0] for each in rounds) * 1e3
        ratios = [
            statistics.median(each["last:20"][clock] / each[other][clock] for each in rounds)
            for other in ("none", "all")
            for clock in (0, 1)
        ]
        ratios += [
            statistics.median(each[way][1] / each["last:20"][1] for each in rounds)
            for way in ("one", "every")
        ]
        texts = " | ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {depth} layers of {size} | {plain:.1f} | {texts} |", flush=True)


if __name__ == "__main__":
    main()
