"""A collector in a shared trace folder: relays write by themselves, it watches and finishes."""

from __future__ import annotations

import time
from pathlib import Path

from rankscope.gather.replica import Replicas, read_end, replicated
from rankscope.gather.roster import PeerState, StreamProgress
from rankscope.gather.shared import read_host_states
from rankscope.record.run import EndReason, StreamId

__all__ = ["SharedWatch"]


class SharedWatch:
    """Streams that relays write into a shared trace folder by themselves."""

    def __init__(self, out: Path) -> None:
        """Watch `out`."""
        self._out = out
        self._seen: dict[StreamId, tuple[int, EndReason | None]] = {}
        self._beats: dict[str, tuple[int, float]] = {}
        self._peers: list[PeerState] = []
        self.progress_at = time.monotonic()
        Replicas(out).close()

    def work(self, timeout_s: float) -> None:
        """Wait, then look at replicas, markers and hosts' states."""
        time.sleep(timeout_s)
        now = time.monotonic()
        found: dict[StreamId, tuple[int, EndReason | None]] = {}
        for stream, length in replicated(self._out).items():
            marker = read_end(self._out, stream)
            found[stream] = (length, marker.end if marker else None)
        if found != self._seen:
            self._seen, self.progress_at = found, now
        self._peers = []
        for name, state in read_host_states(self._out).items():
            beat, since = self._beats.get(name, (-1, now))
            if beat != state.beat:
                since = now
            self._beats[name] = (state.beat, since)
            self._peers.append(
                PeerState(silent_s=now - since, job=state.job, max_restarts=state.max_restarts)
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

    @property
    def trouble(self) -> str:
        """Relays write by themselves, and say so in their own logs."""
        return ""

    def farewell(self) -> None:
        """Nothing to do: relays see the tree appear."""

    def close(self) -> None:
        """Nothing is open."""
