"""Log lines of relay and collector: stderr, which a daemon has in its log file."""

from __future__ import annotations

import sys
import time

__all__ = ["log"]


def log(line: str) -> None:
    """Write one line with the time."""
    try:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} rankscope: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # whoever read the other end is gone; the records still have to be gathered
