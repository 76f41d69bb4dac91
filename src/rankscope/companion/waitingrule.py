"""How long a collector waits, and when a run is over: a pure decision from states of streams and
relays. Its seconds are the settings `drain-seconds` and `finish-seconds`, whose defaults are in
`settings.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rankscope.record.ranks import EndReason, StreamId

_LEAST_SILENCE_S = 5.0
"""A relay is heard every second at least; a shorter silence proves nothing, whatever the grace."""
_ORDERLY = (EndReason.EXIT, EndReason.CLOSED, EndReason.SWITCHED_OFF)


class JobState(enum.IntEnum):
    """What one host knows of its job; the numbers travel."""

    UNKNOWN = 0
    """No launcher of ours: only the ranks' ends tell."""
    LAUNCHED = 1
    """A launcher of ours will say when the job is over: ranks may come back until then."""
    OVER = 2
    """No further incarnation of any rank of this host will come."""


class Decision(enum.Enum):
    """What the collector does next."""

    WAIT = "wait"
    COMPLETE = "complete"
    """Every rank ended in order: build the tree at once."""
    INCOMPLETE = "incomplete"
    """Something is missing and will not come: build the tree from what is there."""
    QUIET = "quiet"
    """Ranks held their steps back, and nothing happened on any host: there is no tree to build."""
    VANISHED = "vanished"
    """The same, but a host is gone without a word: what the others held back is asked for."""
    NOTHING = "nothing"
    """The job is over and no rank ever traced: there is no tree to build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The state of a host, by its relay."""

    alive: int = 1
    held: int = 0
    """Streams that lie there and were not refused."""
    job: JobState
    max_restarts: int = 0
    """How often ranks may come back after an exception, where the job's state is UNKNOWN."""
    quiet: int = 0
    """Ranks that held their steps back, on a host where all ended in order and nothing happened."""

    def heard(self, silent_s: float) -> PeerState:
        """Return the state of a relay that was last heard so long ago."""
        # not by `asdict`, which copies: a thousand relays are asked several times a second
        return PeerState(
            silent_s=silent_s,
            alive=self.alive,
            held=self.held,
            job=self.job,
            max_restarts=self.max_restarts,
            quiet=self.quiet,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState(HostState):
    """One relay as the collector sees it."""

    silent_s: float


class StreamSource(Protocol):
    """Where a collector's streams come from."""

    progress_at: float

    def work(self, timeout_s: float) -> None:
        """Take in what is there; wait for it at most `timeout_s`."""

    def streams(self) -> dict[StreamId, EndReason | None]:
        """Every stream known, and how it ended."""

    def peers(self) -> list[PeerState]:
        """Every relay heard."""

    def excuse(self, seconds: float) -> None:
        """The collector itself was away (suspended, starved): nobody was silent meanwhile."""

    def ask_for_last(self, text: str) -> None:
        """Have what ranks held back sent, although nothing happened on their hosts."""

    @property
    def trouble(self) -> str:
        """Why nothing can be written just now; empty where it can."""
        return ""

    def farewell(self, *, is_quiet: bool) -> None:
        """Tell the relays that the run is finished, and whether nothing happened in it."""

    def close(self) -> None:
        """Let everything go."""


def decide(
    streams: Mapping[StreamId, EndReason | None],
    peers: Sequence[PeerState],
    *,
    expected_ranks: int,
    idle_s: float,
    drain_s: float,
    finish_s: float,
) -> Decision:
    """Return what to do.

    Args:
        streams: every stream known, each incarnation for itself, and how it ended; None while it
            has no end marker.
        peers: every relay that was ever heard.
        expected_ranks: how many ranks of the run are traced.
        idle_s: seconds since a stream, a byte, an end, a relay or another word of one arrived.
        drain_s: grace for ranks and relays that vanished.
        finish_s: grace for streams that stop before their end although the job is over.
    """
    silence_s = max(drain_s, _LEAST_SILENCE_S)
    # a launcher will say when it is over: until then every silence is the job's own business
    if any(peer.job is JobState.LAUNCHED and peer.silent_s < silence_s for peer in peers):
        return Decision.WAIT
    has_ended = bool(streams) and None not in streams.values()
    # sorted by rank and life: the last one of a rank wins
    newest = {stream.rank: stream for stream in sorted(streams)}
    is_whole = len(newest) >= expected_ranks
    restarts = max((peer.max_restarts for peer in peers), default=0)
    held_count = sum(peer.held for peer in peers if peer.silent_s < silence_s)
    is_told = len(streams) >= held_count  # else earlier lives of these ranks are on their way
    is_known = has_ended and is_whole and is_told
    if is_known and all(_is_final(stream, streams[stream], restarts) for stream in newest.values()):
        return Decision.COMPLETE
    is_job_over = bool(peers) and all(peer.job is JobState.OVER for peer in peers)
    living = [peer for peer in peers if peer.silent_s < silence_s]
    # Where steps are held back nothing arrives for hours: a relay's last word ends no shorter wait.
    idle_s = min([idle_s, *(peer.silent_s for peer in peers if peer.silent_s >= silence_s)])
    # Relays of hosts that are through wait for this collector: their words are no sign of work.
    is_deserted = len(living) < len(peers) and all(map(_is_through, living))
    if is_known and is_job_over:
        return Decision.INCOMPLETE
    quiet = sum(peer.quiet for peer in peers)
    if quiet and not streams:
        if quiet >= expected_ranks:
            return Decision.QUIET
        has_vanished = any(peer.silent_s >= silence_s and not peer.quiet for peer in peers)
        if idle_s >= drain_s and all(map(_is_through, living)):
            if not has_vanished:  # all have spoken for their ranks: who is missing called no module
                return Decision.QUIET
            can_be_asked = any(peer.quiet for peer in living) and idle_s < finish_s
            return Decision.VANISHED if can_be_asked else Decision.NOTHING
        return Decision.WAIT
    if idle_s < drain_s or (not is_told and idle_s < finish_s):
        return Decision.WAIT
    if has_ended or (streams and is_deserted):
        return Decision.INCOMPLETE
    if streams and is_job_over and idle_s >= finish_s:
        return Decision.INCOMPLETE
    if not streams and is_job_over:
        return Decision.NOTHING
    if not streams and is_deserted and idle_s >= finish_s:  # a relay that starts may be slow once
        return Decision.NOTHING
    return Decision.WAIT


def _is_through(peer: PeerState) -> bool:
    """True where no rank of this relay's host lives, or will come."""
    has_had_ranks = peer.job is JobState.OVER or (peer.job is JobState.UNKNOWN and peer.held > 0)
    return has_had_ranks and not peer.alive


def _is_final(stream: StreamId, end: EndReason | None, max_restarts: int) -> bool:
    """True where this rank ended in order, or by an exception after which nobody restarts it."""
    if end is EndReason.RAISED:
        return stream.incarnation >= max_restarts
    return end in _ORDERLY
