"""Times as trace files write them."""

from __future__ import annotations

import datetime


def utc_text(wall_ns: int) -> str:
    """Return a wall-clock time, in nanoseconds, in ISO 8601, UTC, to the millisecond."""
    when = datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.timezone.utc)
    return when.isoformat(timespec="milliseconds")
