"""`rankscope clean`: removes what dead runs left on this host, and where it is asked old traces."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from rankscope.cli.terminal import echo
from rankscope.companion.cleanup import is_in_tree, kept_stream, remove_run
from rankscope.errors import SettingError, SpoolError
from rankscope.run import folders as names
from rankscope.run.folders import is_held, read_run_header, spool_base
from rankscope.run.prepare import recover_command
from rankscope.run.processes import is_abandoned, is_process_alive

_JUST_BEGUN_S = 60.0
"""A run folder that is younger may be one whose processes take their locks only now."""
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SUFFIXES = {"", ".json", ".jsonl", ".safetensors", ".parquet", ".cells", ".settled", ".log"}
"""Of files inside the folders of a trace."""
_OF_A_TRACE = names.OF_A_COLLECTOR | {
    *(names.TRACE_NAME, names.TREE_NAME, names.VALUES_NAME, "report.html")
}


class _Remains(NamedTuple):
    folder: Path
    what: str
    stays: str
    """Why it is not removed, "" where it is."""
    remove: Callable[[], object]


def command(
    older: Annotated[
        str, typer.Option(metavar="AGE", help="Of records that no trace has, and of traces.")
    ] = "7d",
    traces: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Old traces in it go too; may be repeated."),
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(metavar="DIR", envvar="RANKSCOPE_SPOOL", help="As --rs-spool of the runs."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what dead runs left in the spool folder of this host: what their traces have too.

    Records that no trace has go once they are old; before, the command is printed that makes a
    trace of them. Exit code 0: done, or nothing to do; 2: nobody could be asked.
    """
    number, unit = older[:-1], older[-1:]
    if not (number.isascii() and number.isdigit() and unit in _UNITS_S):
        raise SettingError(f"--older {older}: expected an age such as 90m, 12h, 7d or 4w")
    limit_s = int(number) * _UNITS_S[unit]
    live: set[Path] = set()
    remains = [*_runs(spool_base(spool), limit_s, live)]
    # behind the runs, which have said by now into which of these traces somebody writes
    remains += [remnant for folder in traces or () for remnant in _traces(folder, limit_s, live)]
    folders = [remnant.folder for remnant in remains]
    # blocks of 512 bytes, not sizes: a spool is a file of its greatest size with holes
    sizes = {folder: sum(file.st_blocks for file in _inside(folder)) / 2048 for folder in folders}
    for remnant in remains:
        fate = f"stays ({remnant.stays})" if remnant.stays else "goes"
        echo(f"{remnant.folder}  {sizes[remnant.folder]:.1f} MiB  {fate}: {remnant.what}")
    going = [remnant for remnant in remains if not remnant.stays]
    if not going:
        echo("nothing to remove")
    elif not dry_run:
        if not yes and not sys.stdin.isatty():
            raise SettingError("nobody can be asked here: give --yes to remove these, or --dry-run")
        if yes or typer.confirm(f"remove {len(going)} of these folders?"):
            for remnant in going:
                remnant.remove()
            gone = [sizes[remnant.folder] for remnant in going if not remnant.folder.exists()]
            echo(f"removed {len(gone)} folder{'s' * (len(gone) != 1)}, {sum(gone):.1f} MiB")
        else:
            echo("nothing was removed")


def _runs(base: Path, limit_s: float, live: set[Path]) -> Iterator[_Remains]:
    """Yield the run folders of this user on this host; `live` takes the traces of those in use."""

    def remove(folder: Path, tree: Path | None) -> None:
        if is_abandoned(folder):  # still; without a tree the records are given up
            is_elsewhere = partial(is_in_tree, folder, tree=tree) if tree else lambda stream: True
            remove_run(folder, is_elsewhere, is_quiet=tree is None)

    for folder, age_s in _own_folders(base):
        try:
            header = read_run_header(folder)
            out, agent = header.out, header.agent
        except SpoolError:  # of one process that traced itself, or no run
            out, agent = folder, ""
            if not is_abandoned(folder):
                continue
        is_in_use = not is_abandoned(folder) or is_process_alive(agent)
        if is_in_use or age_s < _JUST_BEGUN_S:
            live.add(out.resolve())
            stays = "in use" if is_in_use else "younger than a minute"
            yield _Remains(folder, f"traces into {out}", stays, lambda: None)
            continue
        tree = out / names.TRACE_NAME
        if kept_stream(folder, partial(is_in_tree, folder, tree=tree)) is None:
            yield _Remains(folder, f"all of it is in {out}", "", partial(remove, folder, tree))
            continue
        places = [folder, *([out] if (out / names.REPLICA_FOLDER).is_dir() else [])]
        advice = recover_command(*places, out=out)
        stays = "" if age_s >= limit_s else "younger than --older"
        reason = f"records that are in no finished trace: {advice}"
        yield _Remains(folder, reason, stays, partial(remove, folder, None))


def _traces(folder: Path, limit_s: float, live: Collection[Path]) -> Iterator[_Remains]:
    for trace, age_s in _own_folders(folder):
        begin, kind = b"", "a trace"
        if (trace / names.TRACE_NAME).is_file():
            with (trace / names.TRACE_NAME).open("rb") as file:
                # the format and not the name tells a trace: anybody may have a trace.json in a
                # folder of theirs
                begin = file.read(100)
        elif any((trace / names.REPLICA_FOLDER).glob(f"*{names.CELLS_SUFFIX}")):
            kind = f"records that are in no finished trace: {recover_command(trace, out=trace)}"
        if age_s < limit_s or (kind == "a trace" and b'"rankscope.trace/' not in begin):
            continue
        other_names = {path.name for path in trace.iterdir()} - _OF_A_TRACE
        files = (path for path in trace.rglob("*") if not path.is_dir())
        other_names |= {path.name for path in files if path.suffix not in _SUFFIXES} - _OF_A_TRACE
        stays = f"it holds {', '.join(sorted(other_names))}" if other_names else ""
        if trace.resolve() in live or is_held(trace / names.COLLECTOR_LOCK_NAME):
            stays = "in use"
        yield _Remains(trace, kind, stays, partial(shutil.rmtree, trace, ignore_errors=True))


def _own_folders(folder: Path) -> Iterator[tuple[Path, float]]:
    """Yield the folders of this user in a folder, and how long ago anything changed there."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            yield path, time.time() - max(entry.st_mtime for entry in (status, *_inside(path)))


def _inside(folder: Path) -> Iterator[os.stat_result]:
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):  # of a run that goes on meanwhile
                yield os.lstat(os.path.join(place, name))
