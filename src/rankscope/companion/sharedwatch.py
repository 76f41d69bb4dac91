"""A collector in a shared trace folder: relays write by themselves, it watches and finishes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rankscope.companion.replica import ReplicaFiles
from rankscope.companion.waitingrule import HostState, JobState, PeerState, StreamSource
from rankscope.errors import SpoolError
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.agreements import agree
from rankscope.run.filenames import HOST_STATE_PREFIX, REPLICA_FOLDER, VANISHED_NAME
from rankscope.run.files import read_json_map, write_by_rename
from rankscope.spool.replicas import read_end, replica_path, replicated


def write_host_state(out: Path, relay: str, beat: int, state: HostState) -> None:
    """Leave the state of one relay, or raise SpoolError; another `beat` shows that it lives."""
    path = out / REPLICA_FOLDER / f"{HOST_STATE_PREFIX}{relay}.json"
    fields = {"beat": beat, **asdict(state), "job": int(state.job)}
    write_by_rename(path, json.dumps(fields) + "\n")


def read_host_states(out: Path) -> dict[str, tuple[int, HostState]]:
    """Read the beats and states of all relays; one that cannot be read is left out."""
    states = {}
    try:
        names = os.listdir(out / REPLICA_FOLDER)
    except OSError:
        return {}
    for name in names:
        if name.startswith(HOST_STATE_PREFIX) and name.endswith(".json"):
            with contextlib.suppress(SpoolError, KeyError, TypeError, ValueError):
                fields = read_json_map(out / REPLICA_FOLDER / name)
                beat, job = int(fields.pop("beat")), JobState(fields.pop("job"))
                counts = {field: int(count) for field, count in fields.items()}
                states[name] = beat, HostState(job=job, **counts)
    return states


class SharedWatch(StreamSource):
    """Streams that relays write into a trace folder by themselves."""

    def __init__(self, out: Path, own_host: Callable[[], HostState | None] | None = None) -> None:
        """Watch; `own_host` has the state of this host where no other writes into the folder."""
        self._out, self._own_host = out, own_host
        self._seen: dict[StreamId, tuple[int, EndReason | None]] = {}
        self._beats: dict[str, tuple[int, float]] = {}
        self._said: list[HostState] = []
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
        own = None if self._own_host is None else self._own_host()
        if self._own_host is None:
            states = read_host_states(self._out)
        else:  # of a process that hears itself
            states = {} if own is None else {"": (time.monotonic_ns(), own)}
        said = [states[name][1] for name in sorted(states)]
        if said != self._said:
            self._said, self.progress_at = said, now
        for name, (beat, state) in states.items():
            last, since = self._beats.get(name, (-1, now))
            if beat != last:
                since = now
            self._beats[name] = beat, since
            self._peers.append(state.heard(now - since))

    def streams(self) -> dict[StreamId, EndReason | None]:
        """Every stream with a replica, and how it ended."""
        return {stream: end for stream, (_, end) in self._seen.items()}

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

    def farewell(self, *, is_quiet: bool) -> None:
        """Nothing to do: relays see the tree appear."""

    def close(self) -> None:
        """Nothing is open."""
