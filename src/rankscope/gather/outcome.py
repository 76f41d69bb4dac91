"""How a relay or a collector ended: its exit code."""

from __future__ import annotations

import enum

__all__ = ["Outcome"]


class Outcome(enum.IntEnum):
    """Any other code, a signal's above all: it was killed, and starting it again goes on."""

    DONE = 0
    """The run is finished."""
    REFUSED = 2
    """It could not start: another one is at work there, or a folder or address cannot be used."""
    UNFINISHED = 3
    """It gave up, and starting it again would not help: the records are kept."""
    NO_ROOM = 4
    """The trace folder could not be written: the records are kept."""
    REJECTED = 5
    """The collector gathers another run: the records are kept."""
