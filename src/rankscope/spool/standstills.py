"""Files that say when no rank of a host moved: `standstills/<relay>.json`, one for each relay.

They lie in the trace folder, for `check`, and in the host's run folder, for the launcher and for a
relay that is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.record.standstill import Standstill
from rankscope.spool.jsonmap import read_json_map
from rankscope.spool.replacing import write_by_rename

__all__ = [
    "STANDSTILLS_NAME",
    "carry_standstills",
    "keep_standstill",
    "remove_standstills",
    "standstills_in",
]

STANDSTILLS_NAME = "standstills"
"""Folder of these files."""
_FORMAT = "rankscope.standstills/1"
_MOST = 50
"""The latest of one relay that are kept."""
_SAME_NS = 1_000_000_000
"""A relay that was started again reckons the begin anew, from the same record."""


def keep_standstill(folder: Path, relay: str, standstill: Standstill) -> None:
    """Add a standstill to the file of one relay, or bring its entry there up to date.

    Args:
        folder: a trace folder, or a host's run folder.
        relay: file name; hexadecimal digits.
        standstill: what is known of it by now.

    Raises:
        SpoolError: it cannot be written.
    """
    path = folder / STANDSTILLS_NAME / f"{relay}.json"
    others = [s for s in _read(path) if abs(s.since_ns - standstill.since_ns) > _SAME_NS]
    kept = sorted([*others, standstill], key=lambda s: s.since_ns)[-_MOST:]
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SpoolError(f"{path.parent}: cannot be made: {error.strerror}") from error
    text = json.dumps({"format": _FORMAT, "standstills": [s.as_fields() for s in kept]}, indent=1)
    write_by_rename(path, text + "\n")


def standstills_in(folder: Path) -> list[Standstill]:
    """Return all standstills noted in a trace folder or run folder, in order of their begin; what
    cannot be read is left out."""
    found = [s for path in sorted((folder / STANDSTILLS_NAME).glob("*.json")) for s in _read(path)]
    return sorted(found, key=lambda s: s.since_ns)


def carry_standstills(folders: Iterable[Path], out: Path) -> None:
    """Copy what is noted in folders into a new trace folder; what cannot be written is left out."""
    for folder in folders:
        for path in sorted((folder / STANDSTILLS_NAME).glob("*.json")):
            for standstill in _read(path):
                with contextlib.suppress(SpoolError):
                    keep_standstill(out, path.stem, standstill)


def remove_standstills(run_folder: Path) -> None:
    """Remove a run folder's own notes."""
    for path in (run_folder / STANDSTILLS_NAME).glob("*.json"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.rmdir(run_folder / STANDSTILLS_NAME)


def _read(path: Path) -> list[Standstill]:
    try:
        fields = read_json_map(path)
        if fields.get("format") != _FORMAT:
            return []
        return [Standstill.from_fields(each) for each in fields["standstills"]][-_MOST:]
    except (SpoolError, KeyError, TypeError, ValueError, AttributeError):
        return []
