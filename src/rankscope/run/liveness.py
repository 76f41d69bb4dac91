"""Whether anybody is still at work in a run folder."""

from __future__ import annotations

from pathlib import Path

from rankscope.run.filenames import LAUNCHER_LOCK_NAME, RELAY_LOCK_NAME, RUN_NAME, START_LOCK_NAME
from rankscope.run.folders import is_held, stream_folder, streams
from rankscope.run.locks import is_alive

__all__ = ["is_abandoned"]


def is_abandoned(run_folder: Path) -> bool:
    """True for a host's run folder in which nobody is at work: no rank, relay or launcher.

    Without `run.json` it is that of one process that traced itself, once there are records.
    """
    found = streams(run_folder) if run_folder.is_dir() else []
    if not found and not (run_folder / RUN_NAME).is_file():
        return False
    locks = (LAUNCHER_LOCK_NAME, RELAY_LOCK_NAME, START_LOCK_NAME)
    return not any(is_held(run_folder / name) for name in locks) and not any(
        is_alive(stream_folder(run_folder, stream)) for stream in found
    )
