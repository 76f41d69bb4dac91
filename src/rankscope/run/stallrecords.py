"""What is written down of a stall, a time in which no rank of a host moved: `Stall`, and its files.

The files are `stalls/<relay>.json`, one for each relay. They lie in the trace folder, for
`check`, and in the host's run folder, for the launcher and for a relay that is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankscope.errors import SpoolError
from rankscope.record.timetext import utc_text
from rankscope.run.filenames import STALL_FOLDER
from rankscope.run.ownership import own_subfolder
from rankscope.run.replacing import read_json_map, write_by_rename

_NS = 1_000_000_000
_LARGEST_NS = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What one relay noticed. Times are wall-clock nanoseconds of its host."""

    since_ns: int
    """When the last record of any rank was written, or the last rank ended."""
    noticed_ns: int
    over_ns: int = 0
    is_by_end: bool = False
    """It is over because ranks ended, not because one wrote anything."""
    host: str
    where: str = ""

    def sentence(self, now_ns: int | None) -> str:
        """Return a sentence without a full stop; `now_ns` is None where the job is over."""
        since = _clock(self.since_ns)
        where = f": {self.where}" if self.where else ""
        who = f"no rank of {self.host}"
        if self.over_ns:
            how = "then its ranks ended" if self.is_by_end else "then it went on"
            over, lasted = _clock(self.over_ns), self.seconds(self.over_ns)
            return f"{who} moved from {since} to {over} ({lasted} s), {how}{where}"
        if now_ns is None:
            return f"{who} moved after {since}, as far as was seen{where}"
        return f"{who} has moved since {since} ({self.seconds(now_ns)} s){where}"

    def seconds(self, until_ns: int) -> int:
        """Return how long it had lasted at a time, in whole seconds."""
        return max(0, (until_ns - self.since_ns) // _NS)

    def as_evidence(self, now_ns: int | None) -> dict[str, Any]:
        """Return {host, since, until, seconds, message}; `until` is null while no end was seen."""
        return {
            "host": self.host,
            "since": utc_text(self.since_ns),
            "until": utc_text(self.over_ns) if self.over_ns else None,
            "seconds": self.seconds(self.over_ns or now_ns or self.noticed_ns),
            "message": self.sentence(now_ns),
        }

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of its entry in a file."""
        fields = asdict(self)
        return {**fields, "by_end": fields.pop("is_by_end")}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Stall:
        """Return the stall of `as_fields`, or raise KeyError, TypeError or ValueError."""
        times = {name: int(fields[name]) for name in ("since_ns", "noticed_ns", "over_ns")}
        if not all(0 <= each < _LARGEST_NS for each in times.values()):
            raise ValueError(f"times {times} are out of range")
        host, where = str(fields["host"]), str(fields["where"])
        return cls(**times, host=host, is_by_end=bool(fields["by_end"]), where=where)


def _clock(wall_ns: int) -> str:
    then = time.localtime(wall_ns // _NS)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)


_FORMAT = "rankscope.stalls/1"
_MOST = 50


def keep_stall(folder: Path, relay: str, stall: Stall) -> None:
    """Add a stall to the file of one relay, or renew it, or raise SpoolError."""
    path = folder / STALL_FOLDER / f"{relay}.json"
    others = [s for s in _read(path) if s.since_ns != stall.since_ns]
    kept = sorted([*others, stall], key=lambda s: s.since_ns)[-_MOST:]
    try:
        own_subfolder(path.parent)
    except OSError as error:
        raise SpoolError(f"{path.parent}: cannot be made: {error.strerror}") from error
    text = json.dumps({"format": _FORMAT, "stalls": [s.as_fields() for s in kept]}, indent=1)
    write_by_rename(path, text + "\n")


def stalls_in(folder: Path) -> list[Stall]:
    """Return the readable stalls of a trace or run folder, in order of their begin."""
    found = [s for path in sorted((folder / STALL_FOLDER).glob("*.json")) for s in _read(path)]
    return sorted(found, key=lambda s: s.since_ns)


def carry_stalls(folders: Iterable[Path], out: Path) -> None:
    """Copy what is noted in folders into a new trace folder; what cannot be written is left out."""
    for folder in folders:
        for path in sorted((folder / STALL_FOLDER).glob("*.json")):
            for stall in _read(path):
                with contextlib.suppress(SpoolError):
                    keep_stall(out, path.stem, stall)


def remove_stalls(run_folder: Path) -> None:
    """Remove a run folder's own notes."""
    for path in (run_folder / STALL_FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.rmdir(run_folder / STALL_FOLDER)


def _read(path: Path) -> list[Stall]:
    try:
        fields = read_json_map(path)
        if fields.get("format") != _FORMAT:
            return []
        return [Stall.from_fields(each) for each in fields["stalls"]][-_MOST:]
    except (SpoolError, KeyError, TypeError, ValueError, AttributeError):
        return []
