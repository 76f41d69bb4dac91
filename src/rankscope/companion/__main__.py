"""`python -m rankscope.companion`: the companion of a host, started with its run folder alone."""

from __future__ import annotations

import argparse
import errno
import resource
import sys
from pathlib import Path

from rankscope.companion.hostcompanion import HostCompanion
from rankscope.errors import RankscopeError
from rankscope.run.messages import log
from rankscope.run.processes import ExitOutcome, watch_signals

_FILES_WANTED = 65536


def main(arguments: list[str] | None = None) -> int:
    """Run the companion of a host; return its exit code, an `ExitOutcome`."""
    parser = argparse.ArgumentParser(prog="python -m rankscope.companion", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True, help="the host's run folder")
    run_folder: Path = parser.parse_args(arguments).run_folder
    _raise_file_limit()
    is_stopped = watch_signals()
    try:
        return HostCompanion(run_folder, is_stopped).run()
    except RankscopeError as error:
        log(str(error))
        cause = error.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        return ExitOutcome.NO_ROOM if is_full else ExitOutcome.REFUSED


def _raise_file_limit() -> None:
    """At the usual 1,024 descriptors a socket with that many relays spins without working."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


if __name__ == "__main__":
    sys.exit(main())
