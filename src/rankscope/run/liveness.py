"""Whether anybody is still at work in a run folder."""

from __future__ import annotations

from pathlib import Path

from rankscope.run.filenames import (
    HELD_FOLDER,
    LAUNCHER_LOCK_NAME,
    RELAY_LOCK_NAME,
    RUN_NAME,
    START_LOCK_NAME,
)
from rankscope.run.folders import is_held, stream_folder, streams
from rankscope.run.locks import is_alive

__all__ = ["is_abandoned"]


def is_abandoned(run_folder: Path) -> bool:
    """True for a host's run folder in which nobody is at work: no rank, relay or launcher.

    Without `run.json` it is that of one process that traced itself, once there are records.
    """
    places = [place for place in (run_folder, run_folder / HELD_FOLDER) if place.is_dir()]
    found = [stream_folder(place, stream) for place in places for stream in streams(place)]
    if not found and not (run_folder / RUN_NAME).is_file():
        return False
    locks = (LAUNCHER_LOCK_NAME, RELAY_LOCK_NAME, START_LOCK_NAME)
    return not any(is_held(run_folder / name) for name in locks) and not any(
        is_alive(folder) for folder in found
    )
