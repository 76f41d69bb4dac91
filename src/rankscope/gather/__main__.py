"""`python -m rankscope.gather relay|collector`: how the companions are started, each with a host's
run folder alone.
"""

from __future__ import annotations

import argparse
import errno
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rankscope.errors import RankscopeError, SpoolError
from rankscope.gather.log import ExitOutcome, log
from rankscope.run.companions import dataset_trouble, metrics_trouble
from rankscope.run.filenames import RUN_NAME
from rankscope.run.folders import read_run_header
from rankscope.run.prepare import Collection
from rankscope.run.processes import watch_signals
from rankscope.settings import settings_of_run

__all__ = ["main"]

_FILES_WANTED = 65536


def main(arguments: list[str] | None = None) -> int:
    """Run one companion; return its exit code, an `ExitOutcome`."""
    parser = argparse.ArgumentParser(prog="python -m rankscope.gather", description=__doc__)
    parser.add_argument("companion", choices=("relay", "collector"), help="which of the two")
    parser.add_argument("--run-folder", type=Path, required=True, help="the host's run folder")
    options = parser.parse_args(arguments)
    _raise_file_limit()
    is_stopped = watch_signals()
    try:
        if options.companion == "collector":
            return _collect(options.run_folder, is_stopped)
        from rankscope.gather.relay import relay

        return relay(options.run_folder, is_stopped)
    except RankscopeError as error:
        log(str(error))
        cause = error.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full and options.companion == "collector":
            return ExitOutcome.NO_ROOM
        return ExitOutcome.REFUSED


def _collect(run_folder: Path, is_stopped: Callable[[], bool]) -> int:
    """Gather the run that `run.json` describes; what of it cannot be had was said when it began."""
    from rankscope.gather.finish import CollectorOptions, collect

    try:
        header = read_run_header(run_folder)
    except SpoolError:
        if (run_folder / RUN_NAME).exists():
            raise
        return ExitOutcome.DONE  # the relay has left: the run is over
    settings = settings_of_run(header.settings)
    port = settings.metrics
    settings = replace(
        settings,
        keep_spool=settings.keep_spool or header.keeps_apart,
        metrics=None if port is None or metrics_trouble(port) else port,
        # of hosts that keep their records apart the merged trace has a dataset
        parquet=settings.parquet and not header.keeps_apart and not dataset_trouble(),
    )
    options = CollectorOptions(
        out=header.out,
        bind=Collection.of_run(run_folder, header).listens_on(run_folder),
        world_size=header.world_size,
        traced_ranks=header.collects or settings.traced_of(header.world_size),
        settings=settings,
    )
    return collect(options, is_stopped)


def _raise_file_limit() -> None:
    """At the usual 1,024 descriptors a socket with that many relays spins without working."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
