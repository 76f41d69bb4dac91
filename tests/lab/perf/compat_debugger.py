"""What the debugger of `rankscope.compat` takes beside that of transformers 5.23.0, in one run.

    python -m tests.lab.perf.compat_debugger [--rounds 7] [--threads N] [--cpu] [--best]

A round times a plain forward, theirs and ours, each with everything the `with` does, in a folder of
its own. Figures are medians of wall time over the rounds (with --cpu of the process's CPU time, for
a machine with other work; with --best of the fastest round); the ratios are ours to theirs, of the
whole and of what is added to the plain forward.

With tensors two more take their turns, which write the files alone: `floor` the files that ours
left, from memory, each distinct tensor once and links for its other names, and `theirs, files` a
file for each name by safetensors, as theirs does. Both are given as shares of what theirs adds.

The folders are emptied but not removed before the last round: ext4 does not give out an inode that
was deleted within the last minutes, and steps over those one by one, so that a loop which removes
its files measures that, up to 0.8 ms a file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rankscope.compat import model_addition_debugger_context as ours
from rankscope.spool.chunks.safetensors import write_tensor
from rankscope.tree.tensors.rebuild import bytes_of
from tests.lab.perf.overhead import llama

Debugger = Callable[..., AbstractContextManager[nn.Module]]
Clock = Callable[[], float]


def bert() -> nn.Module:
    """Build a BERT of three layers."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4
    )
    return BertModel(config)


def seconds(call: Callable[[Path], object], folder: Path, clock: Clock) -> float:
    """Time a call that writes into a new folder, under `no_grad`."""
    own = Path(tempfile.mkdtemp(dir=folder))
    with torch.no_grad():
        start = clock()
        call(own)
        taken = clock() - start
    for path in own.iterdir():
        os.truncate(path, 0)
    return taken


def watched(
    debugger: Debugger, model: nn.Module, tokens: torch.Tensor, flags: Mapping[str, bool]
) -> Callable[[Path], object]:
    """Return a forward that is watched by a debugger, which writes into the folder it is given."""

    def call(folder: Path) -> None:
        with debugger(model, debug_path=str(folder), **flags):
            model(input_ids=tokens)

    return call


def bare(ours: Callable[[Path], object], folder: Path) -> dict[str, Callable[[Path], object]]:
    """Return what writes the files of tensors that `ours` leaves, and does nothing else."""
    own = Path(tempfile.mkdtemp(dir=folder))
    ours(own)
    first: dict[int, str] = {}
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for path in sorted(own.glob("*.safetensors")):
        name = first.setdefault(path.stat().st_ino, path.name)
        tensor = load_file(path)["data"].clone() if name == path.name else found[name][1]
        found[path.name] = name, tensor

    def once(into: Path) -> None:
        for name, (same, tensor) in found.items():
            path, dtype = f"{into}/{name}", str(tensor.dtype).removeprefix("torch.")
            written = None if name == same else f"{into}/{same}"
            write_tensor(path, dtype, tuple(tensor.shape), bytes_of(tensor), written)

    def each(into: Path) -> None:
        for name, (_, tensor) in found.items():
            save_file({"data": tensor}, into / name)

    return {"floor": once, "theirs, files": each}


def debugger(
    rounds: int, clock: Clock = time.process_time, figure: Callable[[list[float]], float] = min
) -> None:
    """Print a row for each model and mode.

    Args:
        rounds: how often each is timed, after one time for nothing.
        clock: what tells seconds.
        figure: makes one of a contender's times.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("Llama 512 x 8", llama()), ("BERT 256 x 3", bert())):
            _table(name, model.eval(), rounds, Path(folder), clock, figure)


def _table(
    name: str,
    model: nn.Module,
    rounds: int,
    folder: Path,
    clock: Clock,
    figure: Callable[[list[float]], float],
) -> None:
    from transformers.model_debugging_utils import model_addition_debugger_context as theirs

    tokens = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(1))
    print(f"| {name} | plain ms | theirs ms | ours ms | ours / theirs | added / added |", end="")
    print(" floor | theirs, files |\n|---|---|---|---|---|---|---|---|")
    for as_text, prunes in ((True, True), (True, False), (False, True), (False, False)):
        flags = {"use_repr": as_text, "do_prune_layers": prunes}
        calls: dict[str, Callable[[Path], object]] = {
            "plain": lambda _: model(input_ids=tokens),
            "theirs": watched(theirs, model, tokens, flags),
            "ours": watched(ours, model, tokens, flags),
        }
        if not as_text:
            calls |= bare(calls["ours"], folder)
        taken: dict[str, list[float]] = {key: [] for key in calls}
        for _ in range(rounds + 1):
            for key, call in calls.items():
                taken[key].append(seconds(call, folder, clock))
        plain, their, our, *shares = (figure(times[1:]) * 1e3 for times in taken.values())
        mode = ("repr" if as_text else "safetensors") + (", pruned" if prunes else "")
        cells = [f"{share / (their - plain):.2f}" for share in shares] or ["", ""]
        print(
            f"| {mode} | {plain:.1f} | {their:.1f} | {our:.1f} | {our / their:.2f} "
            f"| {(our - plain) / (their - plain):.2f} | {' | '.join(cells)} |",
            flush=True,
        )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch; by default as many as it takes")
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall time")
    parser.add_argument("--best", action="store_true", help="fastest rounds instead of medians")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    print(f"\n{torch.get_num_threads()} threads")
    clock: Clock = time.process_time if given.cpu else time.perf_counter
    debugger(given.rounds, clock, min if given.best else statistics.median)


if __name__ == "__main__":
    main()
