"""What keeping full tensors costs a step: kept beside plain and beside transformers' debugger, and
how much memory it takes.

    python -m tests.perf.tensors --step [--rounds 7] [--folder DIR] [--everything]

The model is the Llama of `tests.perf.overhead` (hidden 512, 8 layers, batch 2 x 128, one thread).
Every round takes each way in turn: a plain step, then the same step inside its context, again and
again, so that whatever else the machine does falls on all of them. Wall time is shown as the ratio
of the best steps and of the medians; CPU time (user and system, this process) as the ratio of the
best, because on a busy machine it is the steadier figure.

A *forward* is one call under `no_grad`. A *training step* is forward, loss, backward, `SGD.step`
and `zero_grad`. transformers' debugger computes everything under `no_grad`, so that no backward can
follow: it is measured on the forward alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import rankscope
from tests.perf.overhead import Step, inference, llama, training

INPUTS_AND_OUTPUTS = "**:input*,**:output*"
Context = Callable[[Path], contextlib.AbstractContextManager[None]]


@dataclass
class Way:
    """One way of running a step, and what it took."""

    name: str
    context: Context
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    kept_mb: float = 0.0
    """Written by one step."""
    files: int = 0


@contextlib.contextmanager
def plain(folder: Path) -> Iterator[None]:
    """Nothing around the step."""
    yield


def kept(model: nn.Module, **settings: object) -> Context:
    """Trace into a folder with these settings."""

    @contextlib.contextmanager
    def context(folder: Path) -> Iterator[None]:
        with rankscope.trace(model, out=folder / "trace", **settings):  # type: ignore[arg-type]
            yield

    return context


def debugger(model: nn.Module, *, use_repr: bool) -> Context:
    """Trace with transformers' debugger; `use_repr=False` writes the tensors."""
    from transformers.model_debugging_utils import model_addition_debugger_context

    @contextlib.contextmanager
    def context(folder: Path) -> Iterator[None]:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            model_addition_debugger_context(
                model, debug_path=str(folder), do_prune_layers=False, use_repr=use_repr
            ),
        ):
            yield

    return context


def written(folder: Path) -> tuple[float, int]:
    """Return MB and files of tensors in a folder."""
    found = [path.stat() for path in folder.rglob("*.safetensors") if path.name[:6] != "values"]
    return sum(stat.st_blocks * 512 for stat in found) / 1e6, len(found)


def measure(way: Way, step: Step, base: Path, repeats: int) -> None:
    """Run a way once: one step to set up, then `repeats` that are timed."""
    folder = Path(tempfile.mkdtemp(dir=base))
    try:
        with way.context(folder):
            step()
            before, _ = written(folder)
            for _ in range(repeats):
                began, worked = time.perf_counter(), time.process_time()
                step()
                way.wall.append(time.perf_counter() - began)
                way.cpu.append(time.process_time() - worked)
            after, way.files = written(folder)
        # the debugger writes the same files again in each step
        way.kept_mb = (after - before) / repeats or after
    finally:
        shutil.rmtree(folder)


def compare(title: str, ways: list[Way], step: Step, base: Path, rounds: int) -> None:
    """Take all ways in turn and print them beside the first."""
    for _ in range(rounds):
        for way in ways:
            measure(way, step, base, 3)
    first = ways[0]
    print(f"\n{title}: plain {min(first.wall) * 1e3:.0f} ms best, "
          f"{statistics.median(first.wall) * 1e3:.0f} median")  # fmt: skip
    print("| way | wall, best | wall, median | CPU, best | ms more | MB a step | MB/s | files |")
    print("|---|---|---|---|---|---|---|---|")
    for way in ways:
        more = min(way.wall) - min(first.wall)
        rate = f"{way.kept_mb / more:.0f}" if way.kept_mb and more > 0 else ""
        print(
            f"| {way.name} | {min(way.wall) / min(first.wall):.2f} "
            f"| {statistics.median(way.wall) / statistics.median(first.wall):.2f} "
            f"| {min(way.cpu) / min(first.cpu):.2f} | {more * 1e3:.0f} "
            f"| {way.kept_mb:.0f} | {rate} | {way.files} |",
            flush=True,
        )


def ways_of(model: nn.Module, *, with_debugger: bool, everything: bool) -> list[Way]:
    """Return what is compared."""
    globs = "**" if everything else INPUTS_AND_OUTPUTS
    what = "everything" if everything else "inputs and outputs"
    ways = [
        Way("plain", plain),
        Way(f"{what} kept, no digests", kept(model, tensors=globs, digest="none")),
        Way(f"{what} kept, with digests", kept(model, tensors=globs)),
        Way("digests alone", kept(model)),
    ]
    if with_debugger:
        ways += [
            Way("transformers' debugger, tensors", debugger(model, use_repr=False)),
            Way("transformers' debugger, repr", debugger(model, use_repr=True)),
        ]
    return ways


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--everything", action="store_true",
                        help="also gradients and parameters")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="peak memory alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"load before: {os.getloadavg()[0]:.1f}")
    if not options.memory:
        for title, make in (("forward, no gradients", inference), ("training step", training)):
            model = llama()
            step = make(model)
            step()
            ways = ways_of(
                model, with_debugger=make is inference, everything=options.everything
            )  # fmt: skip
            compare(title, ways, step, options.folder, options.rounds)
    print(f"load after: {os.getloadavg()[0]:.1f}")
