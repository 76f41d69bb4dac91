"""`python -m rankscope.livecheck`: judges the steps of a running job; the collector starts it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final

from rankscope.livecheck.stepjudge import LiveCheck
from rankscope.run.filenames import TRACE_NAME

__all__ = ["main"]

_NICE: Final = 10


def main(arguments: list[str] | None = None) -> int:
    """Judge until told to stop; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rankscope.livecheck", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="trace folder")
    parser.add_argument("--traced-ranks", type=int, required=True, help="how many are traced")
    parser.add_argument("--on-finding", default="", help="shell command given each finding")
    options = parser.parse_args(arguments)
    watch = LiveCheck(options.out, traced_ranks=options.traced_ranks, command=options.on_finding)

    def stop(number: int, frame: FrameType | None) -> None:
        watch.stop()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    if not (options.out / TRACE_NAME).exists():
        watch.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
