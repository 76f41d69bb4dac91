"""Which receive took which send: the k-th of a channel, counted over the whole run.

A channel is a pair of ranks, a group and a tag. Steps say nothing here: a stage receives before its
own step begins, so its receive may be recorded a step before the send. What counts is the number
that each rank gave the message since a point that all ranks have in common; where a rank had not
seen every message since one, nothing is paired. Nor is a channel whose receives fit the sends
better with an offset than without one: then the numbers are wrong, not the values. Behind a step
that was not traced a receive may have been posted in it, and take what is sent now: there one
message of the channel, at least, has to have come as it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.causeorder import Join
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.issuedcollectives import (
    IssuedCollective,
    equal_by_offset,
    fits_shifted,
    issues_of,
)
from rankscope.diagnosis.rankclock import times_of_call
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.value import ValueFlag

__all__ = ["Message", "Messages", "message_value"]

_Channel = tuple[int, str, str, int, int, int]
"""Incarnation, point it is counted from, group, sender, receiver, tag."""
_FROM_ANYBODY: Final = -1
_BEHIND_A_STEP: Final = "train "
"""Begins the point of a rank that began to record behind a train step."""


class _MessageEnd(NamedTuple):
    """A send or a recv of one rank."""

    step: int
    """Which of the steps of the trace it was recorded in."""
    call_id: str
    """Of its node in the tree."""
    time_ns: int
    """When a send began, when a recv ended."""
    value: tuple[int, bool] | None
    """Hash, and whether it was computed on an accelerator; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A send and the recv that took it."""

    sender: int
    sent: _MessageEnd
    receiver: int
    received: _MessageEnd

    @property
    def is_other(self) -> bool:
        """True where what came is known, and is not what was sent."""
        sent, received = self.sent.value, self.received.value
        if sent is None or received is None or sent[1] != received[1]:
            return False
        return sent[0] != received[0]


@dataclass(slots=True)
class Messages:
    """All sends and receives of a trace; what steps hold otherwise is let go."""

    _sends: dict[_Channel, dict[int, _MessageEnd]] = field(default_factory=dict)
    _receives: dict[_Channel, dict[int, _MessageEnd]] = field(default_factory=dict)
    _open: set[tuple[int, str, str, int]] = field(default_factory=set)
    """(incarnation, point, group, rank) that received from anybody: whose send that took is not
    known, so no later one is either."""
    _doubtful: set[tuple[int, int]] = field(default_factory=set)
    """(incarnation, rank) that sent or received what may have been of any channel."""

    def note(self, step_view: StepView, step: int, context: CheckContext) -> None:
        """Keep the messages of one step."""
        for issue in issues_of(step_view):
            since = str(issue.facts.get("since", ""))
            peer = issue.facts.get("peer")
            if issue.lacks:
                doubtful = {(step_view.incarnation, rank) for rank in issue.ranks.tolist()}
                self._doubtful |= doubtful
            if issue.lacks or not issue.is_message or not since or peer is None:
                continue
            for rank in issue.ranks.tolist():
                if peer == _FROM_ANYBODY:
                    self._open.add((step_view.incarnation, since, issue.group, rank))
                    continue
                is_sent = issue.op == "send"
                ends = (rank, int(peer)) if is_sent else (int(peer), rank)
                tag = int(issue.facts.get("tag", 0))
                channel = (step_view.incarnation, since, issue.group, *ends, tag)
                into = self._sends if is_sent else self._receives
                end = _message_end(issue, rank, step, context, is_sent=is_sent)
                into.setdefault(channel, {})[issue.sequence] = end

    def paired(self) -> Iterator[Message]:
        """Yield every send with its recv, where both are known to be one message."""
        for channel, receives in self._receives.items():
            incarnation, since, group, sender, receiver, _ = channel
            sends = self._sends.get(channel, {})
            is_open = (incarnation, since, group, receiver) in self._open
            is_open |= any((incarnation, rank) in self._doubtful for rank in (sender, receiver))
            fits = _equal_by_offset(sends, receives)
            is_open |= since.startswith(_BEHIND_A_STEP) and not fits.get(0)
            if is_open or fits_shifted(fits):
                continue
            for number, received in receives.items():
                sent = sends.get(number)
                if sent is not None:
                    yield Message(sender=sender, sent=sent, receiver=receiver, received=received)

    def joins(self) -> Iterator[Join]:
        """Yield what every message says of the order of events on its two ranks."""
        for message in self.paired():
            yield Join(
                givers=np.array([message.sender]),
                begins=np.array([message.sent.time_ns]),
                takers=np.array([message.receiver]),
                ends=np.array([message.received.time_ns]),
            )


def message_value(issue: IssuedCollective) -> SlotValues | None:
    """Return what a message carries, as its rank holds it."""
    return issue.call.slots.get("input.0" if issue.op == "send" else "output.0")


def _message_end(
    issue: IssuedCollective, rank: int, step: int, context: CheckContext, *, is_sent: bool
) -> _MessageEnd:
    ranks, value = np.array([rank]), None
    values = message_value(issue)
    place = -1 if values is None else int(values.at(ranks)[0])
    if values is not None and place >= 0 and values.is_known[place]:
        flags = int(values.flags[place])
        if not (is_sent and flags & ValueFlag.AFTER_CALL):
            value = int(values.hashes[place]), bool(flags & ValueFlag.MIX64)
        if not is_sent:
            context.coverage.applied(values)
    time = times_of_call(issue.call, ranks, is_end=not is_sent)
    return _MessageEnd(step, issue.call.node.id, int(time[0]), value)


def _equal_by_offset(
    sends: Mapping[int, _MessageEnd], receives: Mapping[int, _MessageEnd]
) -> dict[int, int]:
    return equal_by_offset(
        {number: end.value for number, end in sends.items()},
        {number: end.value for number, end in receives.items()},
    )
