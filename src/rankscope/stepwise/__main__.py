"""`python -m rankscope.stepwise`: goes with a running job step by step; the collector starts it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rankscope.errors import RankscopeError
from rankscope.run.filenames import PARQUET_FOLDER, TRACE_NAME
from rankscope.run.processes import watch_signals
from rankscope.settings import SETTINGS, settings_from
from rankscope.stepwise.findingsfile import FindingsFile
from rankscope.stepwise.stepjudge import LiveCheck
from rankscope.stepwise.stepkeeper import KeepSizes, StepKeeper
from rankscope.tree.finishedtrace import trace_files
from rankscope.tree.growingtree import grown_steps
from rankscope.tree.views import Trace

__all__ = ["main"]

_NICE: Final = 10
_LOOK_S: Final = 0.25
_REST: Final = 3
"""It rests so many times as long as it worked: several steps together cost less than one by one."""
_MOST_REST_S: Final = 2.0
Look = Callable[[Callable[[], bool]], bool]


def _go_along(
    looks: Sequence[Look], keeper: StepKeeper, parent: int, is_stopped: Callable[[], bool]
) -> None:
    """Look until stopped, or deserted by whoever started this."""
    while not is_stopped() and parent in (0, os.getppid()):
        began = time.monotonic()
        busy = [look(is_stopped) for look in looks]
        took = time.monotonic() - began
        rest = 0.0 if keeper.is_behind else min(_REST * took, _MOST_REST_S)
        until = began + took + max(0.0 if any(busy) else _LOOK_S, rest)
        while not is_stopped() and time.monotonic() < until:
            time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))


def _into_dataset(out: Path) -> Callable[[Trace], None]:
    from rankscope.export.parquet import write_steps  # an extra: its package may be missing

    return lambda trace: write_steps(trace, out / PARQUET_FOLDER)


def _finish_dataset(out: Path) -> None:
    """Make the dataset of a finished trace whole; where that cannot be, say so and exit."""
    from rankscope.export.parquet import write_rest  # as above

    try:
        grown = grown_steps(out)
        write_rest(
            Trace(trace_files(out), out),
            out / PARQUET_FOLDER,
            lambda step: not step.is_setup and step.head.name in grown,
        )
    except (RankscopeError, OSError) as error:
        sys.exit(f"rankscope: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Go along until told to stop; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rankscope.stepwise", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="trace folder")
    parser.add_argument("--traced-ranks", type=int, help="how many are traced")
    parser.add_argument("--parent", type=int, default=0, help="process without which to end")
    parser.add_argument(
        "--finish-dataset", action="store_true", help="write what it lacks of a finished trace"
    )
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    if options.finish_dataset:
        _finish_dataset(options.out)
        return 0
    if options.traced_ranks is None:
        parser.error("--traced-ranks is missing")
    is_stopped = watch_signals()
    settings = settings_from()
    for setting in SETTINGS:  # the command for findings does not inherit them
        os.environ.pop(setting.variable, None)
    out, ranks = options.out, options.traced_ranks
    findings = FindingsFile(out, settings.on_finding)
    looks: list[Look] = []
    judge: LiveCheck | None = None
    if settings.live_check:
        judge = LiveCheck(findings, traced_ranks=ranks)
        looks.append(judge.look)
    keeper = StepKeeper(
        out,
        traced_ranks=ranks,
        say=findings.say,
        sizes=KeepSizes(begin=0) if settings.parquet else KeepSizes(),
        dataset=_into_dataset(out) if settings.parquet else None,
    )
    if not settings.keep_spool:
        looks.append(keeper.look)
    if not (out / TRACE_NAME).exists():
        _go_along(looks, keeper, options.parent, is_stopped)
    if judge is not None:
        judge.close()
    keeper.close()
    findings.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
