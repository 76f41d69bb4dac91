"""When a run is over: a pure decision from what is known of streams and relays."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.record.run import EndReason, StreamId

__all__ = ["Decision", "PeerState", "StreamProgress", "decide"]

_ORDERLY = (EndReason.EXIT, EndReason.CLOSED, EndReason.SWITCHED_OFF)


class Decision(enum.Enum):
    """What the collector does next."""

    WAIT = "wait"
    COMPLETE = "complete"
    """Every rank ended in order: build the tree at once."""
    INCOMPLETE = "incomplete"
    """Something is missing and will not come: build the tree from what is there."""
    NOTHING = "nothing"
    """The job is over and no rank ever traced: there is no tree to build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamProgress:
    """One stream as the collector sees it."""

    stream: StreamId
    end: EndReason | None
    """None while it has no end marker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """One relay as the collector sees it."""

    silent_s: float
    is_job_over: bool


def decide(
    streams: Sequence[StreamProgress],
    peers: Sequence[PeerState],
    *,
    expected_ranks: int,
    idle_s: float,
    drain_s: float,
    finish_s: float,
) -> Decision:
    """Return what to do.

    Args:
        streams: every stream known, each incarnation for itself.
        peers: every relay that was ever heard.
        expected_ranks: how many ranks of the run are traced.
        idle_s: seconds since anything new arrived (a stream, a byte, an end, a relay).
        drain_s: grace for ranks and relays that vanished.
        finish_s: grace for streams that stop before their end although the job is over.
    """
    has_ended = bool(streams) and all(progress.end is not None for progress in streams)
    newest = {
        progress.stream.rank: progress
        for progress in sorted(streams, key=lambda progress: progress.stream)
    }
    is_whole = len(newest) >= expected_ranks
    if has_ended and is_whole and all(one.end in _ORDERLY for one in newest.values()):
        return Decision.COMPLETE
    is_job_over = bool(peers) and all(peer.is_job_over for peer in peers)
    is_deserted = bool(peers) and all(peer.silent_s >= drain_s for peer in peers)
    if has_ended and is_whole and is_job_over:
        return Decision.INCOMPLETE
    if idle_s < drain_s:
        return Decision.WAIT
    if has_ended or (streams and is_deserted):
        return Decision.INCOMPLETE
    if streams and is_job_over and idle_s >= finish_s:
        return Decision.INCOMPLETE
    if not streams and (is_job_over or is_deserted):
        return Decision.NOTHING
    return Decision.WAIT
