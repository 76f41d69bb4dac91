"""`rankscope top`: where the ranks of a running job are, whom they wait for, how fast they are."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rankscope.cli.arguments import LayoutOption, TraceArgument
from rankscope.cli.jobsummary import SORTS, job_summary
from rankscope.cli.terminal import Paint, echo, shown, width
from rankscope.cli.toptext import screen_lines
from rankscope.diagnosis.check import check
from rankscope.diagnosis.finalreport import report_json
from rankscope.errors import FolderError, RankscopeError, SettingError, TraceError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.page.rankplaces import places_in
from rankscope.run.filenames import REPLICA_FOLDER, TRACE_NAME
from rankscope.run.findingnotices import told_in
from rankscope.run.jobstatus import JobStatus, RankStatus, read_status
from rankscope.run.stallrecords import stalls_in
from rankscope.settings import settings_from
from rankscope.tree.damage import UNREADABLE
from rankscope.tree.reader import open_trace, trace_folder
from rankscope.tree.unfinished import is_at_work, received_bytes

__all__ = ["command"]

EXIT_FINDING = 1
_EVERY_S: Final = 1.0
_SHARE: Final = 4
"""A look may take a fourth of the time."""
_KEYS: Final = "q leave  s sort  / ranks"
_ESCAPE: Final = b"\x1b"
_WAIT_S: Final = 3.0
"""One answer waits so long for a status that was written after the question, """
_FIRST_WAIT_S: Final = 10.0
"""and so long for the first of a job that has just begun."""
_POLL_S: Final = 0.05
_VERDICT_S: Final = 600.0
_MOST_JUDGED_BYTES: Final = 256 << 20
"""Records that one answer judges. Of more the live check tells."""
_NICE: Final = 10
_NO_VERDICT: Final[dict[str, Any]] = {"verdict": None, "age_s": None, "trouble": "", "findings": []}
_FINDING: Final = {"kind", "message", "mode", "step", "ranks", "phase", "path", "slot"}
"""Fields that are shown of one."""
Keys = Callable[[float], "bytes | None"]
"""Waits so many seconds for a key; None where none is pressed."""


def command(
    trace: TraceArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: one JSON object on stdout.")
    ] = False,
    ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks to show: 0-3,8 or all.")
    ] = "all",
    sort: Annotated[
        str, typer.Option(metavar="rank|age|time", help="Order of the groups.")
    ] = "rank",
    judges: Annotated[
        bool, typer.Option("--check/--no-check", help="Say what is wrong, or do not.")
    ] = True,
    layout: LayoutOption = None,
) -> None:
    """Show where the ranks of a running job are, on one screen; q or Ctrl-C ends.

    Exit code with --once: 0 no fault so far; 1: `check` found a fault; 2: nothing can be said.
    """
    if sort not in SORTS:
        raise SettingError(f"--sort {sort}: expected {', '.join(SORTS)}")
    if as_json and not once:
        raise SettingError("--json prints one object: give --once with it")
    folder = trace_folder(trace)
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such folder")
    source = TopSource(folder, layout=layout, judges=judges)
    source.choose(ranks)
    source.sort = sort
    if once:
        found = source.one()
        if as_json:
            echo(json.dumps(found))
        else:
            columns = width()
            for line in screen_lines(found, Paint(sys.stdout), columns, 0):
                echo(line)
        if found["check"]["verdict"] == "fault":
            raise typer.Exit(EXIT_FINDING)
        return
    if not sys.stdout.isatty():
        raise SettingError("stdout is no terminal: give --once, and --json for a program")
    _show_until_left(source)


def _show_until_left(source: TopSource) -> None:
    """Show a job until q, Ctrl-C or the end of the input."""
    paint = Paint(sys.stdout)
    note = ""
    with contextlib.suppress(KeyboardInterrupt), _screen() as keys:
        while True:
            began = time.monotonic()
            found = source.now()
            size = shutil.get_terminal_size()
            line = f"{_KEYS} (now: by {source.sort}{note})"
            _draw(screen_lines(found, paint, size.columns, size.lines, line))
            took = time.monotonic() - began
            key = keys(max(_EVERY_S - took, (_SHARE - 1) * took, 0.0))
            if key == b"q":
                return
            if key == b"s":
                names = [*SORTS]
                source.sort = names[(names.index(source.sort) + 1) % len(names)]
            elif key == b"/":
                asked = _asked(keys, size.lines)
                if asked is not None:
                    try:
                        source.choose(asked)
                        note = f", ranks {asked}" if asked.strip() else ""
                    except RankscopeError as error:
                        note = f", {error}"


def _draw(lines: list[str]) -> None:
    """Write over the last screen; nothing flickers, because nothing is cleared before it."""
    text = "".join(f"{shown(line)}\x1b[K\r\n" for line in lines)
    sys.stdout.write(f"\x1b[H{text.removesuffix(chr(13) + chr(10))}\x1b[J")
    sys.stdout.flush()


def _asked(keys: Keys, rows: int) -> str | None:
    """Return the ranks that are typed; "" for all, None where Escape is pressed."""
    typed = ""
    while True:
        sys.stdout.write(f"\x1b[{rows};1H\x1b[Kranks (0-3,8; nothing for all): {typed}")
        sys.stdout.flush()
        key = keys(60.0)
        if key in (None, b"", _ESCAPE):
            return None
        if key in (b"\r", b"\n"):
            return typed
        if key in (b"\x7f", b"\x08"):
            typed = typed[:-1]
        elif key is not None and key in b"0123456789-,al":
            typed += key.decode()


@contextlib.contextmanager
def _screen() -> Iterator[Keys]:
    """Take the terminal: another screen, no cursor, keys as they are pressed; give it back."""
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else -1
    before = termios.tcgetattr(descriptor) if descriptor >= 0 else None

    def keys(seconds: float) -> bytes | None:
        if descriptor < 0:
            time.sleep(seconds)
            return None
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        return os.read(descriptor, 1) or b"q"  # its end: the terminal is gone

    try:
        if before is not None:
            tty.setcbreak(descriptor)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        yield keys
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class TopSource:
    """One trace folder, and what of it is shown."""

    def __init__(self, folder: Path, *, layout: Path | None = None, judges: bool = True) -> None:
        """Look at it for the first time; `layout` is for the verdict, which `judges` asks for.

        Raises:
            LayoutError: the layouts cannot be read.
            TraceError: there is nothing in the folder, and nobody at work on it.
        """
        self.sort = "rank"
        self._ranks: tuple[int, ...] | None = None
        self._folder, self._judges = folder, judges
        self._layouts = None if layout is None else LayoutFile.load(layout)
        self._status = JobStatus()
        self._read: dict[str, tuple[JobStatus, dict[str, Any]]] = {}
        """Of a job on which nobody is at work any more: made of its trace, or of its records."""
        if not self._is_ended():
            self._status = read_status(folder)
            if not received_bytes(folder) and not is_at_work(folder, self._status.run):
                raise TraceError(
                    f"{folder}: holds neither {TRACE_NAME} nor records in {REPLICA_FOLDER}/, and "
                    "nobody is at work on it; give the trace folder of a running job"
                )

    def choose(self, ranks: str) -> None:
        """Show these ranks alone: `0-3,8` or `all`.

        Raises:
            SettingError: this is no list of ranks.
        """
        self._ranks = settings_from({"ranks": ranks.strip() or "all"}, {}).ranks

    def one(self) -> dict[str, Any]:
        """Return what there is to say, the verdict included; takes as long as that takes."""
        began, asked_ns = time.monotonic(), time.time_ns()
        while not self._is_ended():
            self._status = read_status(self._folder)
            most_s = _WAIT_S if self._status.written_ns else _FIRST_WAIT_S
            is_new = self._status.written_ns > asked_ns
            if is_new or time.monotonic() - began > most_s or not self._is_at_work():
                return self.now(self._judged() if self._judges else None)
            time.sleep(_POLL_S)
        return self.now()

    def now(self, check: dict[str, Any] | None = None) -> dict[str, Any]:
        """Look again; return what there is to say, by default with what the live check told."""
        if self._is_ended():
            return self._summary("ended", check)
        self._status = read_status(self._folder)
        return self._summary("running" if self._is_at_work() else "deserted", check)

    def _is_at_work(self) -> bool:
        return is_at_work(self._folder, self._status.run)

    def _summary(self, state: str, check: dict[str, Any] | None) -> dict[str, Any]:
        status = self._status
        if state != "running":
            if state not in self._read:
                self._read[state] = self._places(is_judged=state == "ended")
            status, found = self._read[state]
            check = check or (found if state == "ended" else None)
        chosen = [s for s in status.ranks if self._ranks is None or s.rank in self._ranks]
        now_ns = time.time_ns()
        stalls = [s.sentence(now_ns) for s in stalls_in(self._folder) if not s.over_ns]
        return {
            **job_summary(self._folder, status, chosen, state=state, sort=self.sort),
            "stalls": stalls if state == "running" else [],
            "check": check or self._told(),
        }

    def _judged(self) -> dict[str, Any]:
        """Judge all that has come, once, as `rankscope check` does."""
        size = received_bytes(self._folder)
        if size > _MOST_JUDGED_BYTES:
            gb = f"{size / 1e9:.1f} GB of records"
            return self._told(f"not judged as a whole: {gb}; rankscope check judges them")
        if not size:
            return _NO_VERDICT
        began = time.monotonic()

        def go_on(what: str, part: float) -> None:
            if time.monotonic() - began > _VERDICT_S:
                raise TraceError(f"not judged in {_VERDICT_S:.0f} s: {what}, {part:.0%} done")

        with contextlib.suppress(OSError):
            os.nice(_NICE)
        try:
            report = check(open_trace(self._folder, progress=go_on), self._layouts, progress=go_on)
        except (RankscopeError, OSError, MemoryError, RecursionError, *UNREADABLE) as error:
            return {**_NO_VERDICT, "trouble": f"{type(error).__name__}: {error}"}
        return {**_NO_VERDICT, **report_json(report), "age_s": time.monotonic() - began}

    def _told(self, *said: str) -> dict[str, Any]:
        """Return what the live check told so far; `said` tells why nothing else was asked."""
        if not self._judges:
            return {**_NO_VERDICT, "trouble": "off"}
        told, age_s = told_in(self._folder)
        is_off = self._status.run["settings"].get("live-check") == "0"
        if is_off or age_s is None:
            what = "is off for this job" if is_off else "has judged no step"
            said += (f"the live check {what}; rankscope check judges what has come",)
        said += tuple(str(each["notice"]) for each in told[::-1] if "notice" in each)
        findings = [{**each, "origin": True} for each in told if each.keys() >= _FINDING]
        verdict = "fault" if findings else None if said else "incomplete"
        trouble = "; ".join(said)
        return {"verdict": verdict, "age_s": age_s, "trouble": trouble, "findings": findings}

    def _is_ended(self) -> bool:
        return (self._folder / TRACE_NAME).exists()

    def _places(self, *, is_judged: bool) -> tuple[JobStatus, dict[str, Any]]:
        """Return where ranks were last, and how they ended, and a verdict where one is asked for:
        read once, out of the trace, or of the records as `recover` would join them."""
        size = received_bytes(self._folder)
        if not is_judged and size > _MOST_JUDGED_BYTES:
            return self._status, _NO_VERDICT
        try:
            trace = open_trace(self._folder)
        except RankscopeError:
            if is_judged:
                raise
            return self._status, _NO_VERDICT  # nothing but a status is there
        answer = _NO_VERDICT
        if is_judged:
            report = check(trace, self._layouts)
            answer = {**answer, **report_json(report), "age_s": 0.0}
        hosts = {int(each["rank"]): str(each["host"]) for each in trace.run["ranks"]}
        known = {each.rank: each for each in self._status.ranks}
        ranks = tuple(
            replace(known.get(rank, RankStatus(rank=rank, host=hosts.get(rank, ""), place=place)),
                    place=place)
            for rank, place in sorted(places_in(trace)[0].items())
        )  # fmt: skip
        run = {"id": str(trace.run["id"]), "settings": self._status.run["settings"]}
        world_size = int(trace.run["world_size"])
        return replace(self._status, run=run, world_size=world_size, ranks=ranks), answer
