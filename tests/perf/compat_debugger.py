"""What the debugger of `rankscope.compat` takes beside that of transformers 5.23.0, in one run.

    python -m tests.perf.compat_debugger [--rounds 7] [--threads N] [--cpu]

A round times a plain forward, theirs and ours, each with everything the `with` does, in a folder of
its own. Figures are medians of wall time over the rounds (with --cpu of the process's CPU time, for
a machine with other work); the ratios are ours to theirs, of the whole and of what is added to the
plain forward.

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
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from rankscope.compat import model_addition_debugger_context as ours
from tests.perf.overhead import llama

Debugger = Callable[..., AbstractContextManager[nn.Module]]


def bert() -> nn.Module:
    """Build a BERT of three layers."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4
    )
    return BertModel(config)


def seconds(
    debugger: Debugger | None,
    model: nn.Module,
    folder: Path,
    clock: Callable[[], float],
    *,
    as_text: bool,
    prunes: bool,
) -> float:
    """Time one forward of 2 x 128 tokens, watched by a debugger or by none."""
    tokens = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(1))
    own = tempfile.mkdtemp(dir=folder)
    with torch.no_grad():
        start = clock()
        if debugger is None:
            model(input_ids=tokens)
        else:
            flags = {"use_repr": as_text, "do_prune_layers": prunes}
            with debugger(model, debug_path=own, **flags):
                model(input_ids=tokens)
        taken = clock() - start
    for path in Path(own).iterdir():
        os.truncate(path, 0)
    return taken


def debugger(rounds: int, folder: Path, clock: Callable[[], float]) -> None:
    """Print a row for each model and mode."""
    from transformers.model_debugging_utils import model_addition_debugger_context as theirs

    print("| model | mode | plain ms | theirs ms | ours ms | ours / theirs | added / added |")
    print("|---|---|---|---|---|---|---|")
    for name, model in (("Llama 512 x 8", llama()), ("BERT 256 x 3", bert())):
        model.eval()
        for as_text, prunes in ((True, True), (True, False), (False, True), (False, False)):
            taken: list[list[float]] = [[], [], []]
            for _ in range(rounds + 1):
                for times, which in zip(taken, (None, theirs, ours)):
                    found = seconds(which, model, folder, clock, as_text=as_text, prunes=prunes)
                    times.append(found)
            plain, their, our = (statistics.median(times[1:]) * 1e3 for times in taken)
            mode = ("repr" if as_text else "safetensors") + (", pruned" if prunes else "")
            print(
                f"| {name} | {mode} | {plain:.1f} | {their:.1f} | {our:.1f} | {our / their:.2f} "
                f"| {(our - plain) / (their - plain):.2f} |",
                flush=True,
            )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch; by default as many as it takes")
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall time")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    print(f"\n{torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        debugger(given.rounds, Path(folder), time.process_time if given.cpu else time.perf_counter)


if __name__ == "__main__":
    main()
