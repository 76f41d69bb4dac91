"""Where a collector's streams come from: sockets, or a shared trace folder."""

from __future__ import annotations

from typing import Protocol

from rankscope.gather.roster import PeerState, StreamProgress

__all__ = ["Source"]


class Source(Protocol):
    """Where a collector's streams come from."""

    progress_at: float
    """Monotonic time of the last thing new."""

    def work(self, timeout_s: float) -> None:
        """Take in what is there; wait for it at most `timeout_s`."""

    def streams(self) -> list[StreamProgress]:
        """Every stream known."""

    def peers(self) -> list[PeerState]:
        """Every relay heard."""

    def excuse(self, seconds: float) -> None:
        """The collector itself was away (suspended, starved): nobody was silent meanwhile."""

    @property
    def trouble(self) -> str:
        """Why nothing can be written just now; empty where it can."""

    def farewell(self) -> None:
        """Tell the relays that the run is finished."""

    def close(self) -> None:
        """Let everything go."""
