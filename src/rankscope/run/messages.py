"""What is said on stderr, which may be closed or full: lines, how far a piece of work is, and the
log of a companion, which may also go into a file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankscope.record.texts import visible

_FIRST_S = 1.0
"""Work that ends sooner shows no progress."""
_EVERY_S = 0.2


def say(line: str) -> None:
    """Say one line; where stderr is closed or gone the line is dropped."""
    _write(f"rankscope: {line}\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        write_to_stderr(text)


def write_to_stderr(text: str) -> None:
    """Write past Python's buffer if stderr is the process's own: text that a full disk refuses
    would stay in the buffer, and the flush at exit would end the program with code 120. Raises
    OSError, ValueError, or any exception of a program's own object in place of stderr."""
    stream = sys.stderr
    if stream is None:  # closed before the process began
        return
    is_own = stream is sys.__stderr__
    if not is_own:
        stream.write(text)
    stream.flush()
    if is_own:
        os.write(stream.fileno(), text.encode(errors="backslashreplace"))


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float | None], None]]:
    """Give a function that shows progress on stderr, if that is a terminal, from the first second
    on: the work in progress, and the part that is done. The line vanishes at the end."""
    begin = last_shown = time.monotonic()
    width = 0
    is_shown = False
    with contextlib.suppress(OSError, ValueError):
        is_shown = sys.stderr is not None and sys.stderr.isatty()

    def show(work: str, part: float | None) -> None:
        nonlocal last_shown, width
        now = time.monotonic()
        if is_shown and now - begin >= _FIRST_S and now - last_shown >= _EVERY_S:
            done = "" if part is None else f" {part:4.0%}"
            line = f"rankscope: {work}{done} ({now - begin:.0f} s)"
            _write("\r" + line.ljust(width))
            last_shown, width = now, len(line)

    try:
        yield show
    finally:
        if width:
            _write("\r" + " " * width + "\r")


# ---- logs of companions --------------------------------------------------------------------------

_files: list[Path] = []


def log(line: str) -> None:
    """Write one line with the time."""
    text = f"{time.strftime('%H:%M:%S')} rankscope: {visible(line)}\n"
    if not _files:
        _write(text)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    # a log that cannot be written is no reason to stop: the records still have to be gathered
    with (
        contextlib.suppress(OSError, ValueError),
        os.fdopen(os.open(_files[-1], flags, 0o600), "w") as file,
    ):
        file.write(text)


class FewLines:
    """Lines about what others do, who may do it for ever: the first of them are logged."""

    def __init__(self, limit: int) -> None:
        self._most = limit
        self.count = 0

    def log(self, line: str) -> None:
        """Write one more line, as long as there were few."""
        self.count += 1
        if self.count <= self._most:
            log(line)


@contextlib.contextmanager
def log_into(path: Path) -> Iterator[None]:
    """Have lines appended to a file instead, made with the first one."""
    _files.append(path)
    try:
        yield
    finally:
        _files.pop()
