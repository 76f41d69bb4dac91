"""`rankscope clean`: removes what dead runs left on this host, and where it is asked old traces."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from rankscope.cli.printing import echo

__all__ = ["command"]

_JUST_BEGUN_S = 60.0
"""A run folder that is younger may be one whose processes take their locks only now."""
_UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remains:
    folder: Path
    what: str
    stays: str = ""
    """Why it is not removed, "" where it is."""
    remove: Callable[[], object] = lambda: None
    trace: Path | None = None
    """Of a run that somebody is at work on."""


def command(
    older: Annotated[
        str,
        typer.Option(metavar="AGE", help="Of records that are nowhere else, and of traces."),
    ] = "7d",
    traces: Annotated[
        Optional[list[Path]],  # noqa: UP045  # typer reads it on 3.10
        typer.Option(metavar="FOLDER", help="Old traces in it go too; may be repeated."),
    ] = None,
    spool: Annotated[
        Optional[Path],  # noqa: UP045  # as above
        typer.Option(metavar="DIR", envvar="RANKSCOPE_SPOOL", help="As --rs-spool of the runs."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what dead runs left in the spool folder of this host: what their traces have too.

    Records that are nowhere else go once they are old; before, the command is printed that makes a
    trace of them.

    Exit code 0: removed, or nothing to remove; 2: nobody could be asked.
    """
    import sys

    from rankscope.errors import SettingError
    from rankscope.run.folders import spool_base

    limit_s = _seconds(older)
    remains = [*_runs(spool_base(spool), limit_s)]
    live = [each.trace.resolve() for each in remains if each.trace is not None]
    remains += [each for folder in traces or () for each in _traces(folder, limit_s, live)]
    sizes = {each.folder: _mib(each.folder) for each in remains}
    for each in remains:
        fate = f"stays ({each.stays})" if each.stays else "goes"
        echo(f"{each.folder}  {sizes[each.folder]:.1f} MiB  {fate}: {each.what}")
    going = [each for each in remains if not each.stays]
    if not going:
        echo("nothing to remove")
    if not going or dry_run:
        return
    if not yes and not sys.stdin.isatty():
        raise SettingError("nobody can be asked here: give --yes to remove these, or --dry-run")
    if not yes and not typer.confirm(f"remove {len(going)} of these folders?"):
        return
    for each in going:
        each.remove()
    gone = [sizes[each.folder] for each in going if not each.folder.exists()]
    echo(f"removed {len(gone)} folder{'s' * (len(gone) != 1)}, {sum(gone):.1f} MiB")


def _runs(base: Path, limit_s: float) -> Iterator[_Remains]:
    """Yield the run folders of this user on this host."""
    from rankscope.errors import SpoolError
    from rankscope.gather.cleanup import is_in_tree, kept_stream
    from rankscope.run.eventboard import held_anything
    from rankscope.run.filenames import REPLICA_FOLDER, RUN_NAME, TRACE_NAME
    from rankscope.run.folders import read_run_header, streams
    from rankscope.run.liveness import is_abandoned
    from rankscope.run.outfolder import typed
    from rankscope.run.processes import is_process_alive

    for folder, age_s in _own_folders(base):
        try:
            header = read_run_header(folder)
            out, agent = header.out, header.agent
        except SpoolError:  # of one process that traced itself
            out, agent = folder, ""
        if not ((folder / RUN_NAME).is_file() or streams(folder) or held_anything(folder)):
            continue  # not rankscope's
        if age_s < _JUST_BEGUN_S or not is_abandoned(folder) or is_process_alive(agent):
            yield _Remains(folder=folder, what=f"traces into {out}", stays="in use", trace=out)
            continue
        tree = out / TRACE_NAME
        if kept_stream(folder, lambda stream: is_in_tree(folder, stream, tree)) is None:  # noqa: B023
            what, remove = f"all of it is in {out}", partial(_remove_run, folder, tree)
            yield _Remains(folder=folder, what=what, remove=remove)
            continue
        places = [folder, *([out] if (out / REPLICA_FOLDER).is_dir() else [])]
        command = typed("recover", *places, out=f"{out}-recovered")
        yield _Remains(
            folder=folder,
            what=f"records that are nowhere else: {command}",
            stays="" if age_s >= limit_s else "younger than --older",
            remove=partial(_remove_run, folder, None),
        )


def _remove_run(folder: Path, tree: Path | None) -> None:
    """Remove a run folder; without a tree its records are given up, as was said."""
    from rankscope.gather.cleanup import is_in_tree, remove_run
    from rankscope.run.liveness import is_abandoned

    if is_abandoned(folder):  # still
        is_given_up = tree is None
        remove_run(
            folder,
            lambda stream: tree is None or is_in_tree(folder, stream, tree),
            is_quiet=is_given_up,
        )


def _traces(folder: Path, limit_s: float, live: Sequence[Path]) -> Iterator[_Remains]:
    """Yield the traces in a folder that are old."""
    import shutil

    from rankscope.run.filenames import (
        CELLS_SUFFIX,
        COLLECTOR_LOCK_NAME,
        REPLICA_FOLDER,
        TRACE_NAME,
        VALUES_NAME,
    )
    from rankscope.run.folders import is_held
    from rankscope.run.outfolder import OF_A_COLLECTOR, typed

    for trace, age_s in _own_folders(folder):
        begin = b""
        if (trace / TRACE_NAME).is_file():
            with (trace / TRACE_NAME).open("rb") as file:
                begin = file.read(100)
        is_unfinished = not begin and any((trace / REPLICA_FOLDER).glob(f"*{CELLS_SUFFIX}"))
        if age_s < limit_s or not (is_unfinished or b'"rankscope.trace/' in begin):
            continue
        what = "a trace"
        if is_unfinished:
            what = f"records without a trace: {typed('recover', trace, out=f'{trace}-recovered')}"
        others = {path.name for path in trace.iterdir()} - OF_A_COLLECTOR
        others -= {TRACE_NAME, VALUES_NAME, "report.html"}
        stays = f"it holds {', '.join(sorted(others))}" if others else ""
        if trace.resolve() in live or is_held(trace / COLLECTOR_LOCK_NAME):
            stays = "in use"
        remove = partial(shutil.rmtree, trace, ignore_errors=True)
        yield _Remains(folder=trace, what=what, stays=stays, remove=remove)


def _own_folders(folder: Path) -> Iterator[tuple[Path, float]]:
    """Yield the folders of this user in a folder, and how long ago anything changed there."""
    import os
    import time

    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            times = [each.lstat().st_mtime for each in (path, *path.rglob("*"))]
            yield path, time.time() - max(times)


def _mib(folder: Path) -> float:
    return sum(path.lstat().st_blocks for path in folder.rglob("*")) / 2048


def _seconds(age: str) -> float:
    from rankscope.errors import SettingError

    number, unit = age[:-1], age[-1:]
    if not (number.isascii() and number.isdigit() and unit in _UNITS_S):
        raise SettingError(f"--older {age}: expected an age such as 90m, 12h, 7d or 4w")
    return int(number) * float(_UNITS_S[unit])
