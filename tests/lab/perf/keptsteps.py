"""What keeping full tensors costs a step: kept beside plain and beside transformers' debugger, and
how much memory it takes.

    python -m tests.lab.perf.tensors --step [--rounds 7] [--folder DIR] [--everything] [--memory]

The model is the Llama of `tests.lab.perf.overhead` (hidden 512, 8 layers, batch 2 x 128, one
thread). Every round takes each way in turn: a plain step, then the same step inside its context,
again and again, so that whatever else the machine does falls on all of them. Wall time is shown as
the ratio of the best steps and of the medians; CPU time (user and system, this process) as the
ratio of the best, because on a busy machine it is the steadier figure.

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

import rankscope
from rankscope.agent.values.tensorstore import LocalChunkStore, TensorStore
from rankscope.capture.describe import Describer
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.ranks import StreamId
from rankscope.spool.chunks.writing import ChunkWriter
from tests.lab.perf.overhead import Step, llama

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


def batches() -> Iterator[torch.Tensor]:
    """New tokens for every step: of equal ones nothing would be stored twice."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, 4096, (2, 128), generator=generator)


def inference(model: nn.Module) -> Step:
    """Return one forward without gradients."""
    model.eval()
    batch = batches()

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=next(batch), use_cache=False)

    return forward


def training(model: nn.Module) -> Step:
    """Return one whole training step."""
    model.train()
    batch = batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        tokens = next(batch)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


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
            before, _ = written(folder)  # of the debugger the same files, written again
            for _ in range(repeats):
                began, worked = time.perf_counter(), time.process_time()
                step()
                way.wall.append(time.perf_counter() - began)
                way.cpu.append(time.process_time() - worked)
            after, way.files = written(folder)
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


def peak_mb(work: Callable[[], None]) -> float:
    """Return the largest resident size of this process while `work` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def print_memory(base: Path) -> None:
    """Print the peak of kept training steps beyond plain ones, and of a ring, by the setting."""
    print("\n| --rs-tensor-memory | training step, MB beyond plain | as if from a device |")
    print("|---|---|---|")
    # what is freed goes back at once, so that peaks can be compared
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    for size in (1, 16, 64, 256):
        subprocess.run(
            [sys.executable, "-m", "tests.lab.perf.tensors", "--step", "--folder", str(base),
             "--memory-of", str(size)],
            env=environment, check=True,
        )  # fmt: skip


def memory_of(size: int, base: Path) -> None:
    """Print the row of one setting; in a process of its own."""
    model = llama()
    step = training(model)

    def steps() -> None:
        for _ in range(3):
            step()

    steps()
    alone = peak_mb(steps)
    folder = Path(tempfile.mkdtemp(dir=base))
    try:
        context = kept(model, tensors=INPUTS_AND_OUTPUTS, digest="none", tensor_memory=f"{size}M")
        with context(folder):
            steps()
            watched = peak_mb(steps)
        before = peak_mb(lambda: None)
        staged = peak_mb(lambda: keep_as_if_on_device(folder, size << 20))
    finally:
        shutil.rmtree(folder)
    print(f"| {size} MiB | {watched - alone:.1f} | {staged - before:.1f} |", flush=True)


def keep_as_if_on_device(folder: Path, memory_bytes: int) -> None:
    """Carry 600 tensors of 512 KiB through the ring that accelerators fill.

    The copies that lie on the device there lie in this process here: twice the setting is the
    bound.
    """
    writer = ChunkWriter(folder, StreamId(rank=1, incarnation=0), limit_bytes=1 << 40)
    store = LocalChunkStore(writer, lambda *_: True)
    keeper = TensorStore(
        ("**",), store, lambda *_: True, memory_bytes=memory_bytes, tell=lambda _: None
    )
    describer = Describer(0)
    for number in range(600):
        with invisible():
            described, local = describer.describe(torch.full((1 << 17,), float(number)))
            keeper.keep(local, replace(described, can_digest=False, can_digest_on_device=True))
    keeper.close()


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--everything", action="store_true",
                        help="also gradients and parameters")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="peak memory alone")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.memory_of:
        memory_of(options.memory_of, options.folder)
        return
    print(f"load before: {os.getloadavg()[0]:.1f}")
    kinds = (("forward, no gradients", inference), ("training step", training))
    for title, make in () if options.memory else kinds:
        model = llama()
        step = make(model)
        step()
        ways = ways_of(model, with_debugger=make is inference, everything=options.everything)
        compare(title, ways, step, options.folder, options.rounds)
    print_memory(options.folder)
    print(f"load after: {os.getloadavg()[0]:.1f}")
