"""A standstill: a time in which no rank of one host moved, as the relay of that host saw it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Standstill", "utc_text"]

_NS = 1_000_000_000
_LARGEST_NS = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """What one relay noticed. Times are wall-clock nanoseconds of its host."""

    host: str
    since_ns: int
    """When the last record of any rank was written, or the last rank ended."""
    noticed_ns: int
    over_ns: int = 0
    """When a rank moved again, or ended; 0 while none did."""
    is_by_end: bool = False
    """It is over because ranks ended, not because one wrote anything."""
    where: str = ""
    """What the ranks that count are inside of."""

    def told(self, now_ns: int | None) -> str:
        """Return it as a sentence without a full stop.

        Args:
            now_ns: wall-clock time; None where the job is known to be over.
        """
        since = _clock(self.since_ns)
        where = f": {self.where}" if self.where else ""
        if self.over_ns:
            how = "then its ranks ended" if self.is_by_end else "then it went on"
            lasted = self.seconds(self.over_ns)
            over = _clock(self.over_ns)
            return f"no rank of {self.host} moved from {since} to {over} ({lasted} s), {how}{where}"
        if now_ns is None:
            return f"no rank of {self.host} moved after {since}, as far as was seen{where}"
        seconds = self.seconds(now_ns)
        return f"no rank of {self.host} has moved since {since} ({seconds} s){where}"

    def seconds(self, until_ns: int) -> int:
        """Return how long it had lasted at a time, in whole seconds."""
        return max(0, (until_ns - self.since_ns) // _NS)

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of its entry in a file."""
        return {
            "host": self.host,
            "since_ns": self.since_ns,
            "noticed_ns": self.noticed_ns,
            "over_ns": self.over_ns,
            "by_end": self.is_by_end,
            "where": self.where,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Standstill:
        """Return the standstill of `as_fields`.

        Raises:
            KeyError, TypeError, ValueError: the fields are not those of one.
        """
        times = [int(fields[name]) for name in ("since_ns", "noticed_ns", "over_ns")]
        if not all(0 <= each < _LARGEST_NS for each in times):
            raise ValueError(f"times {times} are out of range")
        return cls(
            host=str(fields["host"]),
            since_ns=times[0],
            noticed_ns=times[1],
            over_ns=times[2],
            is_by_end=bool(fields["by_end"]),
            where=str(fields["where"]),
        )


def utc_text(wall_ns: int) -> str:
    """Return a wall-clock time in ISO 8601, UTC, to the millisecond."""
    when = datetime.datetime.fromtimestamp(wall_ns / _NS, datetime.timezone.utc)
    return when.isoformat(timespec="milliseconds")


def _clock(wall_ns: int) -> str:
    """Return a time of day here, with the date where that is not today's."""
    then = time.localtime(wall_ns // _NS)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)
