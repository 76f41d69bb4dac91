"""Damages inputs of every decoder and looks what leaves it.

    python -m tests.lab.fuzz --inputs 100000 --seed 1             # shared among all decoders
    python -m tests.lab.fuzz --inputs 50000 --only definitions    # of one

Each input is made from the seed, the decoder's name and its number, so that a fault comes again.
Ctrl-C ends the decoder at hand and goes on with the next.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rankscope.errors import RankscopeError
from tests.lab.fuzz import samples
from tests.lab.fuzz.decoders import DECODERS, Decoder

MOST_BYTES = 500 << 20
MOST_SECONDS = 60
_ANEW_S = 30.0
"""After so long the limit counts from what is mapped then."""


@dataclass
class Outcome:
    """What became of the inputs of one decoder."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    """By where they were raised."""
    first: dict[str, str] = field(default_factory=dict)
    """Traceback of the first of each, and the input."""


class TookTooLongError(Exception):
    """An input kept a decoder for a minute."""


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise TookTooLongError


def allow(most_bytes: int = MOST_BYTES) -> None:
    """Allow this process so much more memory than it has mapped now."""
    gc.collect()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + most_bytes, hard))


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limit memory, and ring after a minute, while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, _ring)
    allow()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def fuzz(decoder: Decoder, inputs: int, seed: int, *, is_limited: bool = False) -> Outcome:
    """Give a decoder so many damaged inputs.

    `is_limited`: inside `limits`; what earlier inputs left behind is not counted for ever.
    """
    made = decoder.make(random.Random(f"{seed}/{decoder.name}"))
    outcome = Outcome()
    begin = time.perf_counter()
    allowed = begin
    for number in range(inputs):
        if is_limited and number % 256 == 0 and time.perf_counter() - allowed > _ANEW_S:
            allow()
            allowed = time.perf_counter()
        given = next(made)
        outcome.inputs += 1
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            decoder.take(given)
        except RankscopeError:
            outcome.refused += 1
        except KeyboardInterrupt:
            outcome.inputs -= 1
            break
        except Exception as error:
            place = _place(error)
            outcome.faults[place] += 1
            if place not in outcome.first:
                outcome.first[place] = f"{traceback.format_exc()[-3000:]}{_shown(given)}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/rankscope/" in f.filename] or frames
    return f"{type(error).__name__} {Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}"


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 1500 else f"{text[:700]} ... {text[-700:]}"


def main() -> int:
    """Run, and print a line for each decoder; 1 where one let something foreign out."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fuzz")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[each.name for each in DECODERS])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [each for each in DECODERS if not options.only or each.name in options.only]
    total = sum(each.share for each in chosen)
    faults = 0
    try:
        for each in chosen:
            next(each.make(random.Random(0)))  # what it needs is there before memory is limited
        with limits():
            for each in chosen:
                found = fuzz(
                    each,
                    max(1, round(options.inputs * each.share / total)),
                    options.seed,
                    is_limited=True,
                )
                faults += found.faults.total()
                print(
                    f"{each.name:>14}: {found.inputs:>9} inputs, {found.refused:>9} refused, "
                    f"{found.faults.total():>5} faults, {found.seconds:8.1f} s",
                    flush=True,
                )
                for place, count in found.faults.most_common():
                    print(f"    {count} x {place}\n{found.first[place]}")
    finally:
        samples.clear()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {peak / 1024:.0f} MB")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
