"""`python -m rankscope.companion.running`: reads a running job, or makes what is to be made of one
that is over. The companion of the head host starts it, and goes on without it where it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rankscope.companion.running.rankstatuses import StatusWriter
from rankscope.companion.running.runningjob import KeepSizes, RunningJob, StepKeeper
from rankscope.companion.running.stepjudge import MOST_REST_S, FindingsFile, LiveCheck
from rankscope.errors import FolderError, RankscopeError
from rankscope.run.folders import PARQUET_FOLDER, TRACE_NAME, read_run_header
from rankscope.run.processes import TREE_TROUBLE, ExitOutcome, settings_of_gathering, watch_signals
from rankscope.tree.build import build
from rankscope.tree.growingtree import grown_steps, trace_files
from rankscope.tree.views import Trace

_NICE: Final = 10
_STATUS_NICE: Final = 19
_PR_SET_PDEATHSIG: Final = 1
_LOOK_S: Final = 0.25
_REST: Final = 3
"""Reading rests so many times as long as it took."""


def _end_with(parent: int) -> None:
    """Have this process killed with its parent: another one may replace both, and two would
    write."""
    # asked of the kernel: a parent that is killed runs no handler that could end its child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # it may have died before the call above: then no signal ever comes
    if os.getppid() != parent:
        sys.exit("rankscope: what started this process is gone")


def _build_tree(out: Path, *, keep_spool: bool) -> int:
    """Build the tree, and say how far it is; return the exit code."""

    def say(phase: str, part: float | str) -> None:
        sys.stdout.write(f"{part} {phase}\n")
        sys.stdout.flush()

    try:
        build(out, keep_spool=keep_spool, progress=say)
    except FolderError as error:
        say(f"the tree was not built, and the records are kept: {error}", TREE_TROUBLE)
        return ExitOutcome.NO_ROOM
    except Exception:  # noqa: BLE001  # the job's records must survive any fault of the tree's
        for line in traceback.format_exc().splitlines():
            say(line, TREE_TROUBLE)
        say(f"the tree was not built; the records are kept in {out}", TREE_TROUBLE)
        return ExitOutcome.UNFINISHED
    return 0


def _go_along(job: RunningJob, keeper: StepKeeper | None, is_stopped: Callable[[], bool]) -> None:
    """Look until stopped."""
    while not is_stopped():
        began = time.monotonic()
        is_busy = job.look(is_stopped)
        took = time.monotonic() - began
        is_behind = keeper is not None and keeper.is_behind
        pause = 0.0 if is_behind else min(_REST * took, MOST_REST_S)
        until = began + took + max(0.0 if is_busy else _LOOK_S, pause)
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
    parser = argparse.ArgumentParser(
        prog="python -m rankscope.companion.running", description=__doc__
    )
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--run-folder", type=Path, help="go along with this run")
    work.add_argument("--build-tree", type=Path, help="build the tree of this trace folder")
    work.add_argument(
        "--finish-dataset", type=Path, help="write what the dataset of this finished trace lacks"
    )
    parser.add_argument("--parent", type=int, help="process that started it, and ends it")
    parser.add_argument("--keep-spool", action="store_true", help="keep the records of the tree")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    if options.parent is not None:
        _end_with(options.parent)
    if options.build_tree is not None:
        return _build_tree(options.build_tree, keep_spool=options.keep_spool)
    if options.finish_dataset is not None:
        _finish_dataset(options.finish_dataset)
        return 0
    is_stopped = watch_signals()
    header = read_run_header(options.run_folder)
    settings, out = settings_of_gathering(header), header.out
    job = RunningJob(out, traced_ranks=header.collects)
    findings = FindingsFile(out, settings.on_finding)
    judge: LiveCheck | None = None
    keeper: StepKeeper | None = None
    job.listeners.append(StatusWriter(job, out))
    if settings.live_check:
        judge = LiveCheck(job, findings)
        job.listeners.append(judge)
    if not settings.keep_spool:
        keeper = StepKeeper(
            job,
            out,
            say=findings.say,
            sizes=KeepSizes(begin=0) if settings.parquet else KeepSizes(),
            dataset=_into_dataset(out) if settings.parquet else None,
        )
        job.listeners.append(keeper)
    if judge is None and keeper is None:  # a status alone can wait for whoever has work to do
        with contextlib.suppress(OSError):
            os.nice(_STATUS_NICE - _NICE)
            # Linux weighs sessions, each by a nice of its own, and nice within them alone
            Path("/proc/self/autogroup").write_text(str(_STATUS_NICE))
    if not (out / TRACE_NAME).exists():
        _go_along(job, keeper, is_stopped)
    if judge is not None:
        judge.close()
    if keeper is not None:
        keeper.close()
    findings.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
