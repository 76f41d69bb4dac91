"""A collector in a shared trace folder: relays write by themselves, it watches and finishes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.gather.replica import ReplicaFiles
from rankscope.gather.waitingrule import JobState, PeerState, StreamProgress
from rankscope.record.streams import EndReason, StreamId
from rankscope.run.eventboard import agree
from rankscope.run.filenames import HOST_STATE_PREFIX, REPLICA_FOLDER, VANISHED_NAME
from rankscope.run.replacing import read_json_map, write_by_rename
from rankscope.spool.replication import read_end, replica_path, replicated

__all__ = ["SharedHostState", "SharedWatch", "read_host_states", "write_host_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedHostState:
    """What one relay says of itself."""

    beat: int
    job: JobState
    max_restarts: int
    alive: int
    held: int
    quiet: int = 0


def write_host_state(out: Path, relay: str, state: SharedHostState) -> None:
    """Leave the state of one relay.

    Raises:
        SpoolError: it cannot be written.
    """
    path = out / REPLICA_FOLDER / f"{HOST_STATE_PREFIX}{relay}.json"
    fields = {**asdict(state), "job": int(state.job)}
    write_by_rename(path, json.dumps(fields) + "\n")


def read_host_states(out: Path) -> dict[str, SharedHostState]:
    """Read the states of all relays; one that cannot be read is left out."""
    states = {}
    try:
        names = os.listdir(out / REPLICA_FOLDER)
    except OSError:
        return {}
    for name in names:
        if not (name.startswith(HOST_STATE_PREFIX) and name.endswith(".json")):
            continue
        try:
            fields = read_json_map(out / REPLICA_FOLDER / name)
            states[name] = SharedHostState(
                beat=int(fields["beat"]),
                job=JobState(fields["job"]),
                max_restarts=int(fields["max_restarts"]),
                alive=int(fields.get("alive", 1)),
                held=int(fields.get("held", 0)),
                quiet=int(fields.get("quiet", 0)),
            )
        except (SpoolError, KeyError, TypeError, ValueError):
            continue
    return states


class SharedWatch:
    """Streams that relays write into a shared trace folder by themselves."""

    def __init__(self, out: Path) -> None:
        """Watch `out`."""
        self._out = out
        self._seen: dict[StreamId, tuple[int, EndReason | None]] = {}
        self._beats: dict[str, tuple[int, float]] = {}
        self._said: list[SharedHostState] = []
        self._peers: list[PeerState] = []
        self.progress_at = time.monotonic()
        ReplicaFiles(out).close()

    def work(self, timeout_s: float) -> None:
        """Wait, then look at replicas, markers and hosts' states."""
        time.sleep(timeout_s)
        now = time.monotonic()
        found: dict[StreamId, tuple[int, EndReason | None]] = {}
        for stream, length in replicated(self._out).items():
            marker = read_end(replica_path(self._out, stream))
            found[stream] = (length, marker.end if marker else None)
        if found != self._seen:
            self._seen, self.progress_at = found, now
        self._peers = []
        states = read_host_states(self._out)
        said = [replace(states[name], beat=0) for name in sorted(states)]
        if said != self._said:
            self._said, self.progress_at = said, now
        for name, state in states.items():
            beat, since = self._beats.get(name, (-1, now))
            if beat != state.beat:
                since = now
            self._beats[name] = (state.beat, since)
            self._peers.append(
                PeerState(
                    silent_s=now - since,
                    job=state.job,
                    max_restarts=state.max_restarts,
                    held=state.held,
                    alive=state.alive,
                    quiet=state.quiet,
                )
            )

    def streams(self) -> list[StreamProgress]:
        """Every stream with a replica."""
        return [StreamProgress(stream=one, end=end) for one, (_, end) in self._seen.items()]

    def peers(self) -> list[PeerState]:
        """Every host that wrote a state."""
        return self._peers

    def excuse(self, seconds: float) -> None:
        """Move every clock on by the time the collector was away."""
        self.progress_at += seconds
        self._beats = {name: (beat, at + seconds) for name, (beat, at) in self._beats.items()}

    def ask_for_last(self, text: str) -> None:
        """Leave word for the relays."""
        with contextlib.suppress(OSError):  # asked again
            agree(self._out / REPLICA_FOLDER, VANISHED_NAME, text)

    @property
    def trouble(self) -> str:
        """Relays write by themselves, and say so in their own logs."""
        return ""

    def building(self) -> None:
        """Nothing to do: nobody sends anything here."""

    def farewell(self, *, is_quiet: bool) -> None:
        """Nothing to do: relays see the tree appear."""

    def close(self) -> None:
        """Nothing is open."""
