"""Log lines of companions: stderr, which a daemon has in its log file, or a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankscope.record.texts import visible

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

    def __init__(self, limit: int) -> None:
        self._most = limit
        self.count = 0

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
