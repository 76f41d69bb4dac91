"""The screen of `rankscope top` on a plain terminal: renewed each second, with a few keys."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Final

from rankscope.cli.printing import shown
from rankscope.cli.terminal import Paint
from rankscope.cli.topsource import TopSource
from rankscope.cli.toptext import screen_lines
from rankscope.errors import RankscopeError
from rankscope.live.jobsummary import SORTS

__all__ = ["show_until_left"]

_EVERY_S: Final = 1.0
_SHARE: Final = 4
"""A look may take a fourth of the time."""
_KEYS: Final = "q leave  s sort  / ranks"
_ESCAPE: Final = b"\x1b"


Keys = Callable[[float], "bytes | None"]
"""Waits so many seconds for a key; None where none is pressed."""


def show_until_left(source: TopSource) -> None:
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
