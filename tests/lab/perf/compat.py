"""What rankscope's forms of the Hugging Face tools cost, beside the tools themselves in one run.

    python -m tests.lab.perf.compat [--rounds 25] [--only capture]

Each part alternates its contenders in short rounds of one process; a figure is the fastest round,
because what else the machine does only adds. CPU seconds are counted, and one thread runs.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from tests.lab.compat.migrated import pair
from tests.lab.perf.compat_debugger import debugger

Call = Callable[[], object]


def seconds(call: Call, times: int) -> float:
    """Return CPU seconds of some calls."""
    begin = time.process_time()
    for _ in range(times):
        call()
    return time.process_time() - begin


def alternate(calls: dict[str, Call], rounds: int, times: int) -> dict[str, float]:
    """Return microseconds a call takes, by name: the fastest of `rounds` rounds."""
    for call in calls.values():
        seconds(call, 2)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            took[name].append(seconds(call, times) / times * 1e6)
    return {name: min(values) for name, values in took.items()}


def capture(rounds: int) -> None:
    """Print what `capture_outputs` and `merge_with_config_defaults` add to a forward of a Llama, by
    what is asked for.
    """
    from transformers import LlamaConfig

    print("| Llama | call | undecorated | transformers 5.23.0 | rankscope |")
    print("|---|---|---|---|---|")
    states, both = {"output_hidden_states": True}, {"output_attentions": True}
    rows: dict[str, dict[str, bool]] = {
        "nothing asked": {}, "hidden states": states, "states, attentions": {**states, **both},
        "nothing asked, after a capture": {},
    }  # fmt: skip
    for width, depth, tokens, times in ((16, 4, 8, 4), (16, 32, 8, 1), (256, 8, 128, 1)):
        config = LlamaConfig(
            vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=depth,
            num_attention_heads=4, attn_implementation="eager",
        )  # fmt: skip
        theirs, ours = pair("llama", "LlamaModel", config)
        bare, _ = pair("llama", "LlamaModel", config)
        plain = type(bare).forward.__wrapped__.__wrapped__
        bare.__class__ = type("Bare", (type(bare),), {"forward": plain})
        ids = torch.randint(0, 64, (2, tokens))
        for row, flags in rows.items():
            call = functools.partial(torch.no_grad()(_call), ids=ids, flags=flags)
            calls = {
                "bare": functools.partial(call, bare, flags={}),
                "theirs": functools.partial(call, theirs),
                "ours": functools.partial(call, ours),
            }
            took = alternate(calls, rounds, times)
            base = took.pop("bare")
            cells = " | ".join(f"{t - base:+.0f} µs ({t / base:.3f})" for t in took.values())
            print(f"| {width} wide, {depth} layers | {row} | {base:.0f} µs | {cells} |", flush=True)


def _call(model: nn.Module, ids: torch.Tensor, flags: dict[str, bool]) -> object:
    return model(ids, use_cache=False, **flags)


PARTS: dict[str, Callable[[int], None]] = {"capture": capture, "debugger": debugger}


def main() -> None:
    """Print the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=sorted(PARTS))
    chosen = parser.parse_args()
    for name, part in PARTS.items():
        if chosen.only in (None, name):
            part(chosen.rounds)


if __name__ == "__main__":
    main()
