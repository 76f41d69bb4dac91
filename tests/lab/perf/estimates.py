"""How well `diff` estimates distances from digests: prints figures, asserts nothing.

    python -m tests.lab.perf.estimates [--layers 4] [--steps 3]

Runs the example GPT in one process and in three topologies, in float32 and bfloat16, with all full
tensors kept. Every distance is estimated from sketches, and computed from the tensors.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankscope.diagnosis.comparison.diff import diff
from rankscope.diagnosis.comparison.difference import Tolerances

EXAMPLES = Path(__file__).parents[3] / "examples"
TOPOLOGIES = (("ddp", 2), ("tensor_parallel", 2), ("fsdp2_tp", 4))


def train(example: str, dtype: str) -> None:
    """Run one example with its model in a dtype, in this process."""
    sys.path.insert(0, str(EXAMPLES))
    gpt = importlib.import_module("gpt")
    build = gpt.build
    gpt.build = lambda sizes: build(sizes).to(getattr(torch, dtype))
    importlib.import_module(example).main()


def trace(folder: Path, example: str, ranks: int, dtype: str, options: list[str]) -> Path:
    """Trace one run with all its tensors."""
    out = folder / f"{example}-{dtype}"
    subprocess.run(
        [
            sys.executable, "-m", "rankscope", "run", "--rs-out", str(out), "--rs-steps", "all",
            "--rs-tensors", "**", "--nproc-per-node", str(ranks), "-m", "tests.lab.perf.estimates",
            "--example", example, "--dtype", dtype, *options,
        ],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return out


def distances(ref: Path, test: Path, *, tensors: bool) -> dict[Any, Mapping[Any, float]]:
    """{step: {value: relative L2 distance}}."""
    found = {}

    def note(step: Any, differences: Any, _: Any) -> None:
        found[step] = differences.errors

    diff(ref, test, tensors=tensors, each_step=note)
    found.pop(None, None)  # setup
    return found


def show(ref: Path, test: Path) -> None:
    """Print how estimates stand to true distances, of values that are further off than sketches
    tell."""
    true, guessed = (distances(ref, test, tensors=reads) for reads in (True, False))
    pairs = [
        (own[key], guessed[step][key])
        for step, own in true.items()
        for key in own
        if key in guessed[step]
    ]
    far = [(a, b) for a, b in pairs if Tolerances.resolution < a < np.inf]
    line = f"{ref.name:>22} {test.name:>26} {len(pairs):6d} values, {len(far):5d} above resolution"
    if far:
        ratios = np.array([b / a for a, b in far])
        inside = np.mean((ratios >= 0.2) & (ratios <= 5))
        low, high = np.quantile(ratios, [0.01, 0.99])
        line += f": {inside:7.2%} within 0.2 to 5 times, 98 % are {low:.2f} to {high:.2f} times"
    print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="4")
    parser.add_argument("--steps", default="3")
    parser.add_argument("--example", help="run this one here")
    parser.add_argument("--dtype", default="float32")
    chosen, rest = parser.parse_known_args()
    options = ["--layers", chosen.layers, "--steps", chosen.steps]
    if chosen.example:
        sys.argv = [chosen.example, *options, *rest]
        train(chosen.example, chosen.dtype)
        return
    with tempfile.TemporaryDirectory(prefix="rankscope-perf-") as name:
        folder = Path(name)
        alone = trace(folder, "one_process", 1, "float32", options)
        for dtype in ("float32", "bfloat16"):
            for example, ranks in TOPOLOGIES:
                show(alone, trace(folder, example, ranks, dtype, options))


if __name__ == "__main__":
    main()
