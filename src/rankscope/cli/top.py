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
from typing import Annotated, Final

import typer

from rankscope.cli.arguments import LayoutOption, TraceArgument
from rankscope.cli.terminal import Paint, echo, shown, width
from rankscope.cli.topsource import SORTS, TopSource
from rankscope.cli.toptext import screen_lines
from rankscope.errors import FolderError, RankscopeError, SettingError
from rankscope.tree.reader import trace_folder

EXIT_FINDING = 1
_EVERY_S: Final = 1.0
_SHARE: Final = 4
"""A look may take a fourth of the time."""
_KEYS: Final = "q leave  s sort  / ranks"
_ESCAPE: Final = b"\x1b"
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
    source = TopSource(folder, layout, judges=judges)
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
