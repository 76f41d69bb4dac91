"""Log lines of relay and collector: stderr, which a daemon has in its log file, or a file."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankscope.record.visibletext import visible

__all__ = ["ExitOutcome", "FewLines", "log", "log_into"]


class ExitOutcome(enum.IntEnum):
    """Any other code, a signal's above all: it was killed, and starting it again goes on."""

    DONE = 0
    """The run is finished."""
    REFUSED = 2
    """It could not start: another one is at work there, or a folder or address cannot be used."""
    UNFINISHED = 3
    """It gave up, and starting it again would not help: the records are kept."""
    NO_ROOM = 4
    """The trace folder could not be written: the records are kept."""
    REJECTED = 5
    """The collector gathers another run: the records are kept."""
    STRANGE = 6
    """Collector and relay have keys that do not fit: the records are kept."""


_files: list[Path] = []


def log(line: str) -> None:
    """Write one line with the time."""
    text = f"{time.strftime('%H:%M:%S')} rankscope: {visible(line)}\n"
    try:
        if _files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(_files[-1], flags, 0o600), "w") as file:
                file.write(text)
        else:
            # past Python's buffer: what a full disk refuses would stay in it, and the process would
            # end with code 120 in place of its own when that is flushed once more
            os.write(2, text.encode(errors="backslashreplace"))
    except (OSError, ValueError):
        pass  # whoever read the other end is gone; the records still have to be gathered


class FewLines:
    """Lines about what others do, who may do it for ever: the first of them are logged."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0
        """How many there were."""

    def log(self, line: str) -> None:
        """Write one more line, as long as there were few."""
        self.count += 1
        if self.count <= self._most:
            log(line)


@contextmanager
def log_into(path: Path) -> Iterator[None]:
    """Have lines appended to a file instead, made with the first one."""
    _files.append(path)
    try:
        yield
    finally:
        _files.pop()
