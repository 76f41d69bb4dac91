"""`rankscope collect`: a collector by hand, for ranks that are started elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from rankscope.cli.arguments import ExitCode
from rankscope.cli.terminal import remark
from rankscope.companion.gathering import Observer
from rankscope.companion.hostcompanion import HostCompanion
from rankscope.errors import SettingError
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.connection import check_address, is_tcp, read_keys
from rankscope.run.folders import (
    COLLECTOR_LOG_NAME,
    SHARED,
    TRACE_NAME,
    RunHeader,
    write_run_header,
)
from rankscope.run.messages import log_into, progress
from rankscope.run.prepare import (
    QUIET,
    announcement,
    default_out,
    free_out,
    prepare_out,
    recover_command,
)
from rankscope.run.processes import dataset_trouble, metrics_trouble
from rankscope.settings import DRAIN_SECONDS, FINISH_SECONDS, settings_from
from rankscope.tree.reader import open_trace
from rankscope.words.joblines import JobNotices


def command(
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the job.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Trace folder; made with its parents, refused when it holds something else; "
            "default rankscope-<time> here."
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Where to listen: ipc:///path, or tcp://HOST:PORT."),
    ] = "",
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key file of TCP, made by `rankscope keys new`."),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Listen nowhere: every host writes into --out; the default."),
    ] = False,
    ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks that are traced: 0-3,8 or all.")
    ] = "all",
    keep_spool: Annotated[
        bool, typer.Option("--keep-spool", help="Keep the ranks' records beside the tree.")
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Grace for ranks that vanished without an end record.")
    ] = DRAIN_SECONDS,
    finish_seconds: Annotated[
        float, typer.Option(min=0, help="Grace for ranks that go silent although the job is over.")
    ] = FINISH_SECONDS,
    metrics: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Serve metrics at 127.0.0.1:PORT."),
    ] = None,
    live_check: Annotated[
        bool, typer.Option(help="Judge each traced step soon after it ended.")
    ] = True,
    on_finding: Annotated[
        str, typer.Option(metavar="CMD", help="Shell command given each finding as JSON on stdin.")
    ] = "",
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write each step into a Parquet dataset too.")
    ] = False,
) -> None:
    """Gather the records of a job whose ranks are started elsewhere, and build its tree.

    Exit code 0: the trace is complete; 1: anything is missing; 2: it could not start.
    """
    if shared and bind:
        raise SettingError("--shared listens nowhere: leave out --bind or --shared")
    settings = settings_from(
        {
            "ranks": ranks,
            "keep_spool": keep_spool,
            "keys": keys,
            "metrics": metrics,
            "live_check": live_check,
            "on_finding": on_finding,
            "parquet": parquet,
            "finish_seconds": finish_seconds,
            "drain_seconds": drain_seconds,
        },
        {},
    )
    if not settings.traced_of(world_size):
        raise SettingError(f"--ranks: none of these is in a world of {world_size}")
    if keys is not None and not is_tcp(bind):
        raise SettingError("--keys are those of TCP: give --bind tcp://HOST:PORT, or no keys")
    if settings.keys is not None:  # this and the next before a folder is made
        read_keys(settings.keys, is_collector=True)
    if bind:
        check_address(bind, has_keys=keys is not None)
    trouble = "" if metrics is None else metrics_trouble(metrics)
    if trouble:
        raise SettingError(f"--metrics {metrics}: {trouble}")
    trouble = dataset_trouble() if parquet else ""
    if trouble:
        raise SettingError(f"--parquet: {trouble}")
    asked = out.expanduser().absolute() if out else free_out(default_out())
    folder = prepare_out(asked, "--out", is_shared=True)
    header = RunHeader(
        run_id="collect",  # the first host that comes says the run
        out=folder,
        collector=bind or SHARED,
        world_size=world_size,
        settings=settings.as_text(),
        collects=settings.traced_of(world_size),
    )
    write_run_header(folder, header)
    raise typer.Exit(_collect(header, has_dataset=parquet))


def _collect(header: RunHeader, *, has_dataset: bool) -> int:
    out, traced_ranks = header.out, header.collects
    happened_nothing: list[bool] = []
    notices = JobNotices(out, str(out), remark)
    with progress() as show:

        class Terminal(Observer):
            def quiet(self) -> None:
                happened_nothing.append(True)

            def listening(self, addresses: Sequence[str]) -> None:
                where = ", ".join(addresses) or f"hosts that write into {out}"
                ranks = f"{traced_ranks} rank{'s' * (traced_ranks > 1)}"
                remark(f"waiting for {ranks} at {where}; trace in {out}")

            def gathering(self, streams: Mapping[StreamId, EndReason | None]) -> None:
                present_ranks = {stream.rank for stream in streams}
                ended = sum(end is not None for end in streams.values())
                text = f"{len(present_ranks)} of {traced_ranks} ranks are here, ended:"
                show(text, ended / max(len(streams), traced_ranks))
                notices.look()

            def building(self, text: str, part: float) -> None:
                show(text, part)

        with _stop_signals() as is_stopped, log_into(out / COLLECTOR_LOG_NAME):
            code = HostCompanion(out, is_stopped, Terminal()).run()
    log_path = out / COLLECTOR_LOG_NAME
    if has_dataset and (out / TRACE_NAME).exists() and log_path.exists():
        remark(f"the dataset is not whole: see {log_path}")
    return _verdict(out, code, is_quiet=bool(happened_nothing))


def _verdict(out: Path, outcome: int, *, is_quiet: bool) -> int:
    if outcome:
        remark(
            f"no tree in {out}, see {out / COLLECTOR_LOG_NAME}; build it from the records: "
            + recover_command(out, out=out)
        )
        return ExitCode.FINDING
    if is_quiet:
        remark(QUIET)
        return ExitCode.FINE
    if not (out / TRACE_NAME).exists():
        remark(f"nothing was traced: no rank sent a record to {out}")
        return ExitCode.FINDING
    is_complete = open_trace(out).is_complete
    remark(announcement(out, is_complete=is_complete))
    return ExitCode.FINE if is_complete else ExitCode.FINDING


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Finish with what is there at the first Ctrl-C or SIGTERM; the second ends the process."""
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        signal.signal(number, before[signal.Signals(number)])
        # not through sys.stderr: the main thread may be inside a write of its own
        os.write(2, b"rankscope: stopping: building the tree from what is here\n")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(stops)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
