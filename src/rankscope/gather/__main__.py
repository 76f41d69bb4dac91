"""`python -m rankscope.gather relay|collector`: how the companions are started."""

from __future__ import annotations

import argparse
import errno
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rankscope.errors import RankscopeError, SpoolError
from rankscope.gather.log import ExitOutcome, log
from rankscope.record.graceseconds import DRAIN_SECONDS, FINISH_SECONDS
from rankscope.run.folders import read_run_header
from rankscope.run.keyfile import read_keys

__all__ = ["main"]

_FILES_WANTED = 65536


def main(arguments: list[str] | None = None) -> int:
    """Run one companion; return its exit code, an `ExitOutcome`."""
    options = _parser().parse_args(arguments)
    _raise_file_limit()
    is_stopped = _watch_signals()
    try:
        if options.companion == "relay":
            from rankscope.gather.relay import relay

            return relay(options.run_folder, is_stopped)
        from rankscope.gather.finish import CollectorOptions, collect

        return collect(
            CollectorOptions(
                out=options.out.absolute(),
                bind=options.bind,
                world_size=options.world_size,
                traced_ranks=options.traced_ranks or options.world_size,
                keep_spool=options.keep_spool,
                drain_s=options.drain_seconds,
                finish_s=options.finish_seconds,
                metrics_port=options.metrics,
                live_check=not options.no_live_check,
                on_finding=_on_finding(options.run_folder),
                parquet=options.parquet,
                keys=None if options.keys is None else read_keys(options.keys, is_collector=True),
            ),
            is_stopped,
        )
    except RankscopeError as error:
        log(str(error))
        cause = error.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full and options.companion == "collector":
            return ExitOutcome.NO_ROOM
        return ExitOutcome.REFUSED


def _on_finding(run_folder: Path | None) -> str:
    """Return the command for findings from `run.json`: everybody may read command lines."""
    try:
        return "" if run_folder is None else read_run_header(run_folder).settings["on-finding"]
    except (SpoolError, KeyError):  # the relay has left: the run is over
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rankscope.gather", description=__doc__)
    companions = parser.add_subparsers(dest="companion", required=True)
    relay = companions.add_parser("relay", help="ship the spools of one host")
    relay.add_argument("--run-folder", type=Path, required=True, help="the host's run folder")
    collector = companions.add_parser("collector", help="gather a run and build its tree")
    collector.add_argument("--out", type=Path, required=True, help="trace folder")
    collector.add_argument("--bind", nargs="*", default=[], help="addresses; none: shared folder")
    collector.add_argument("--world-size", type=int, required=True, help="ranks of the job")
    collector.add_argument("--traced-ranks", type=int, default=0, help="how many are traced")
    collector.add_argument("--keep-spool", action="store_true", help="keep the replicas")
    collector.add_argument(
        "--drain-seconds", type=float, default=DRAIN_SECONDS, help="grace for the lost"
    )
    collector.add_argument(
        "--finish-seconds", type=float, default=FINISH_SECONDS, help="grace at the end"
    )
    collector.add_argument("--metrics", type=int, help="port of the loopback for metrics")
    collector.add_argument("--no-live-check", action="store_true", help="judge nothing meanwhile")
    collector.add_argument("--run-folder", type=Path, help="this host's: its run.json is read")
    collector.add_argument("--parquet", action="store_true", help="write a dataset too")
    collector.add_argument("--keys", type=Path, help="key file of TCP addresses")
    return parser


def _raise_file_limit() -> None:
    """At the usual 1,024 descriptors a socket with that many relays spins without working."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _watch_signals() -> Callable[[], bool]:
    """Outlive the terminal's Ctrl-C, which is for the ranks; note a SIGTERM."""
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, note)
    return lambda: bool(stops)


if __name__ == "__main__":
    sys.exit(main())
