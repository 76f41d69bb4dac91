"""The one decision about what may be removed or freed: nothing that is not known to be elsewhere.

A rank, a relay, a collector, the process beside the steps and the commands all remove records. Each
knows something else of where they are. What it knows becomes a `Place`, and the table `_RULES`
decides. A disk without room is no reason: what is asked for stays, and the rank drops what is new.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple


class Removable(enum.Enum):
    """What is to go."""

    TURN = "turn"
    """A run of steps of a ring, freed by its rank (`spool.ringwriter`)."""
    SEGMENT = "segment"
    """A full segment of a stream, freed by the relay."""
    STREAM = "stream"
    HELD = "held"
    """What a rank held back. Its copy is a stream, which goes by that rule."""
    REPLICA = "replica"


class Reach(enum.IntEnum):
    """How far another place of the same records goes."""

    NOWHERE = 0
    BEGUN = 1
    COPIED = 2
    """All of them are in another file of this disk."""
    ACKNOWLEDGED = 3
    DURABLE = 4
    """All of them are on disk elsewhere, where readers find them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is known of one piece."""

    reach: Reach
    is_asked: bool = True
    """Somebody asked for these records, or may still; records that are not held back always are."""
    has_writer: bool = False


class _Rule(NamedTuple):
    reach: Reach
    """At least so far another place has to go."""
    allows_writer: bool
    allows_unasked: bool


_RULES: Final[Mapping[Removable, _Rule]] = {
    Removable.TURN: _Rule(Reach.COPIED, allows_writer=True, allows_unasked=True),
    Removable.SEGMENT: _Rule(Reach.DURABLE, allows_writer=True, allows_unasked=False),
    Removable.STREAM: _Rule(Reach.DURABLE, allows_writer=False, allows_unasked=False),
    Removable.HELD: _Rule(Reach.COPIED, allows_writer=False, allows_unasked=True),
    Removable.REPLICA: _Rule(Reach.DURABLE, allows_writer=True, allows_unasked=False),
}


def may_remove(piece: Removable, place: Place) -> bool:
    """Return whether these records may be removed or freed."""
    rule = _RULES[piece]
    if place.has_writer and not rule.allows_writer:
        return False
    return place.reach >= rule.reach or (rule.allows_unasked and not place.is_asked)
