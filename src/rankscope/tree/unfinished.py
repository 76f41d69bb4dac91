"""Whether a job that has no tree yet may still get one, and where this host keeps its records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.run.folders import find_runs, is_held, spool_base
from rankscope.run.liveness import is_abandoned
from rankscope.run.names import COLLECTOR_LOCK_NAME, HOST_STATE_PREFIX, REPLICA_FOLDER

__all__ = ["is_at_work", "spool_bases"]

_SILENT_S = 30.0
"""Relays of other hosts leave a word in a shared folder every second."""


def is_at_work(folder: Path, run: Mapping[str, Any]) -> bool:
    """True while a collector, or a rank, relay or launcher of this host, is at work on the run, or
    another host's relay was just now.
    """
    if is_held(folder / COLLECTOR_LOCK_NAME):
        return True
    if any(not is_abandoned(one) for one in find_runs(spool_bases(run), str(run["id"]))):
        return True
    states = (folder / REPLICA_FOLDER).glob(f"{HOST_STATE_PREFIX}*.json")
    written = [path.stat().st_mtime for path in states]
    return time.time() - max(written, default=0.0) < _SILENT_S


def spool_bases(run: Mapping[str, Any]) -> list[Path]:
    """Return the folders in which a host keeps the spools of a run."""
    chosen = run["settings"].get("spool")
    return sorted({spool_base(None), spool_base(Path(chosen) if chosen else None)})
