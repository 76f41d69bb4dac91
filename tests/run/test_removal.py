"""What may be removed: no order of copies, acknowledgements, kills and full disks loses a record
that somebody asked for."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from rankscope.run.files import Place, Reach, Removable, may_remove

ALLOWED = {
    Removable.TURN: {(Reach.COPIED, True, True), (Reach.NOWHERE, False, True)},
    Removable.SEGMENT: {(Reach.DURABLE, True, True)},
    Removable.STREAM: {(Reach.DURABLE, True, False)},
    Removable.HELD: {(Reach.COPIED, True, False), (Reach.NOWHERE, False, False)},
    Removable.REPLICA: {(Reach.DURABLE, True, True)},
}
"""For each piece the least that is known where it goes: reach, asked for, writer lives."""


@pytest.mark.parametrize("piece", Removable)
def test_the_table_is_the_whole_decision(piece: Removable):
    for reach, is_asked, has_writer in itertools.product(Reach, (True, False), (True, False)):
        place = Place(reach=reach, is_asked=is_asked, has_writer=has_writer)
        allowed = any(
            reach >= least and (asked or not is_asked) and (writer or not has_writer)
            for least, asked, writer in ALLOWED[piece]
        )
        assert may_remove(piece, place) == allowed, (piece, place)


@dataclass(frozen=True)
class Host:
    """One step of one rank on its way to a tree. What is known is what processes can know; where
    the records are is the truth."""

    ring: bool = True
    held: bool = True
    """The folder of what is held back."""
    copy: Reach = Reach.NOWHERE
    """The stream that its relay makes of it: BEGUN has another part than the step."""
    stream: bool = False
    """That stream lies on the host's disk."""
    replica: Reach = Reach.NOWHERE
    """Of the collector: ACKNOWLEDGED is in its memory of written pages alone."""
    replica_there: bool = False
    tree: bool = False
    asked: bool = False
    is_over: bool = False
    """No event can come any more."""
    rank: bool = True
    relay: bool = True
    full: bool = False
    """The host's disk."""

    @property
    def is_there(self) -> bool:
        """The step's records are somewhere that outlasts a loss of power elsewhere."""
        of_host = (self.ring and self.held) or (self.stream and self.copy >= Reach.COPIED)
        return of_host or (self.replica_there and self.replica is Reach.DURABLE) or self.tree


def moves(host: Host) -> Iterator[Host]:
    """Everything that may happen next; what is removed is asked of `may_remove` alone."""
    if host.rank:
        yield replace(host, asked=True)
        yield replace(host, rank=False)
        asked = Place(reach=host.copy, is_asked=host.asked, has_writer=True)
        if host.ring and may_remove(Removable.TURN, asked):
            yield replace(host, ring=False)
    else:
        yield replace(host, asked=True) if not host.is_over else host
        yield replace(host, is_over=True)
    yield replace(host, full=not host.full)
    yield replace(host, relay=not host.relay)  # killed, or started again
    if host.relay:
        if host.asked and host.ring and host.held and not host.full:
            yield replace(host, stream=True, copy=max(host.copy, Reach.BEGUN))
            yield replace(host, stream=True, copy=Reach.COPIED)
        if host.stream and host.copy >= Reach.COPIED:
            yield replace(host, replica_there=True, replica=max(host.replica, Reach.ACKNOWLEDGED))
        sent = Place(reach=host.replica, has_writer=host.rank)
        if host.stream and any(may_remove(p, sent) for p in (Removable.SEGMENT, Removable.STREAM)):
            yield replace(host, stream=False)
        quiet = host.is_over and not host.asked
        back = Place(reach=host.copy, is_asked=not quiet, has_writer=host.rank)
        if host.held and may_remove(Removable.HELD, back):
            yield replace(host, held=False)
    if host.replica_there and host.replica is Reach.ACKNOWLEDGED:
        yield replace(host, replica=Reach.DURABLE)
        yield replace(host, replica=Reach.NOWHERE, replica_there=False)  # its host lost power
    if host.replica_there and host.replica is Reach.DURABLE:
        yield replace(host, tree=True)
    in_tree = Place(reach=Reach.DURABLE if host.tree else Reach.BEGUN)
    if host.replica_there and may_remove(Removable.REPLICA, in_tree):
        yield replace(host, replica_there=False)


def test_no_order_of_events_loses_what_was_asked_for_while_it_was_held():
    seen = {Host()}
    waiting = deque(seen)
    while waiting:
        host = waiting.popleft()
        for after in moves(host):
            if host.asked and host.is_there:
                assert after.is_there, (host, after)
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    assert len(seen) > 300
    assert any(h.tree and not (h.ring or h.held or h.stream or h.replica_there) for h in seen)
    assert any(not h.asked and not h.is_there for h in seen)
