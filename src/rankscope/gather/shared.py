"""A trace folder that every host sees: the state each relay leaves there for the collector.

`<out>/spool/host-<relay>.json` counts up once a second while its relay lives.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.gather.replica import REPLICAS_NAME
from rankscope.gather.roster import JobState
from rankscope.spool.jsonmap import read_json_map
from rankscope.spool.replacing import write_by_rename

__all__ = ["HostState", "read_host_states", "write_host_state"]

_PREFIX = "host-"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What one relay says of itself."""

    beat: int
    job: JobState
    max_restarts: int


def write_host_state(out: Path, relay: str, state: HostState) -> None:
    """Leave the state of one relay.

    Raises:
        SpoolError: it cannot be written.
    """
    path = out / REPLICAS_NAME / f"{_PREFIX}{relay}.json"
    fields = {"beat": state.beat, "job": int(state.job), "max_restarts": state.max_restarts}
    write_by_rename(path, json.dumps(fields) + "\n")


def read_host_states(out: Path) -> dict[str, HostState]:
    """Read the states of all relays; one that cannot be read is left out."""
    states = {}
    try:
        names = os.listdir(out / REPLICAS_NAME)
    except OSError:
        return {}
    for name in names:
        if not (name.startswith(_PREFIX) and name.endswith(".json")):
            continue
        try:
            fields = read_json_map(out / REPLICAS_NAME / name)
            states[name] = HostState(
                beat=int(fields["beat"]),
                job=JobState(fields["job"]),
                max_restarts=int(fields["max_restarts"]),
            )
        except (SpoolError, KeyError, TypeError, ValueError):
            continue
    return states
