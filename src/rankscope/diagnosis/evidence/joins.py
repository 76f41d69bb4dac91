"""What ranks did together, as far as a trace shows it: the joints of the order of causes.

Recorded collectives come first. Reductions of gradients run in C++ and leave no record, so the
gradients just before an optimizer step join the ranks that hold parts or replicas of a parameter.

**Messages** may join two steps: a stage receives before its own step begins, so its receive may be
recorded a step before the send. The k-th receive of a channel (a pair of ranks, a group and a tag)
took its k-th send, counted since a point that all ranks have in common. Nothing is paired where a
rank had not seen every message since one, nor where receives fit the sends better with an offset
than without: then the numbers are wrong, not the values. Behind a step that was not traced a
receive may have been posted in it: there one message of the channel has to have come as sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.context import CheckContext, JudgedStep
from rankscope.diagnosis.evidence.issuedcollectives import (
    IssuedCollective,
    equal_by_offset,
    fits_shifted,
    issues_of,
    known_collectives,
    ranks_in_doubt,
)
from rankscope.diagnosis.evidence.stepview import SlotValues, StepView
from rankscope.diagnosis.finalreport import Join
from rankscope.diagnosis.rules.batches import StageLink, stage_edges
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag

_ONE_WAY: Final = {"broadcast", "scatter"}
_TO_ONE: Final = {"reduce", "gather", "gather_into_tensor"}


def joins_of(
    step_view: JudgedStep, is_one: Callable[[StepView, IssuedCollective], bool]
) -> Iterator[Join]:
    """Yield the joints of one step but for messages; `is_one` says what is one collective."""
    for issue in known_collectives(step_view):
        if len(issue.ranks) > 1 and is_one(step_view, issue):
            yield _collective(issue)
    for edge in stage_edges(step_view):
        yield from _stage(edge)
    yield from _events(step_view)


def _collective(issue: IssuedCollective) -> Join:
    ranks = issue.ranks
    begins, ends = issue.call.span(ranks)
    ends = np.maximum(ends, begins + 1)
    every = np.ones(len(ranks), bool)
    givers = ranks == issue.facts.get("src") if issue.op in _ONE_WAY else every
    takers = ranks == issue.facts.get("dst") if issue.op in _TO_ONE else every
    if not givers.any() or not takers.any():
        givers = takers = every
    return Join(
        givers=ranks[givers], begins=begins[givers], takers=ranks[takers], ends=ends[takers]
    )


def _stage(edge: StageLink) -> Iterator[Join]:
    sender, receiver = np.array([edge.sender]), np.array([edge.receiver])
    for micro in edge.sent.keys() & edge.taken.keys():
        sent, taken = edge.sent[micro], edge.taken[micro]
        if sent[1] == taken[1]:
            yield Join(
                givers=sender,
                begins=sent[0].times(sender),
                takers=receiver,
                ends=taken[0].times(receiver),
            )


def _events(step_view: JudgedStep) -> Iterator[Join]:
    seen: set[bytes] = set()
    incarnation = step_view.life
    for values in step_view.values(Phase.GRADS):
        meshes = [np.sort(np.array(m.ranks, np.int64)) for v in values.views for m in v.meshes]
        groups = meshes or list(incarnation.replicas.lines)
        if not groups and values.agree(values.ranks):
            groups = [values.ranks]
        for group in groups:
            own = group[np.isin(group, values.ranks)]
            if len(own) < 2 or own.tobytes() in seen or (not meshes and values.agree(own) is False):
                continue
            seen.add(own.tobytes())
            times = values.call.times(own)
            yield Join(givers=own, begins=times - 1, takers=own, ends=times - 1)


# ---- messages ------------------------------------------------------------------------------------

_Channel = tuple[int, str, str, int, int, int]
"""Incarnation, point it is counted from, group, sender, receiver, tag."""
_FROM_ANYBODY: Final = -1
_BEHIND_A_STEP: Final = "train "
"""Begins the point of a rank that began to record behind a train step."""


class _MessageEnd(NamedTuple):
    """A send or a recv of one rank."""

    step: int
    call_id: str
    time_ns: int
    """When a send began, when a recv ended."""
    value: tuple[int, bool] | None
    """As `SlotValues.told` has it."""


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
    """(incarnation, rank) that sent or received on an unknown channel."""

    def note(self, step_view: JudgedStep, step: int) -> None:
        """Keep the messages of one step."""
        self._doubtful |= {(step_view.incarnation, rank) for rank in ranks_in_doubt(step_view)}
        for issue in issues_of(step_view):
            since = str(issue.facts.get("since", ""))
            if issue.lacks or not issue.is_message or not since:
                continue
            peer = issue.facts["peer"]
            for rank in issue.ranks.tolist():
                if peer == _FROM_ANYBODY:
                    self._open.add((step_view.incarnation, since, issue.group, rank))
                    continue
                is_sent = issue.op == "send"
                ends = (rank, int(peer)) if is_sent else (int(peer), rank)
                tag = int(issue.facts.get("tag", 0))
                channel = (step_view.incarnation, since, issue.group, *ends, tag)
                into = self._sends if is_sent else self._receives
                end = _message_end(issue, rank, step, step_view.context, is_sent=is_sent)
                into.setdefault(channel, {})[issue.sequence] = end

    def paired(self) -> Iterator[Message]:
        """Yield every send with its recv, where both are known to be one message."""
        for channel, receives in self._receives.items():
            incarnation, since, group, sender, receiver, _ = channel
            sends = self._sends.get(channel, {})
            is_open = (incarnation, since, group, receiver) in self._open
            is_open |= any((incarnation, rank) in self._doubtful for rank in (sender, receiver))
            fits = equal_by_offset(
                {number: end.value for number, end in sends.items()},
                {number: end.value for number, end in receives.items()},
            )
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
    ranks = np.array([rank])
    values = message_value(issue)
    value = None if values is None else values.told(rank)
    if values is not None and value is not None:
        if is_sent and values.flags[values.at(ranks)[0]] & ValueFlag.AFTER_CALL:
            value = None
        if not is_sent:
            context.coverage.applied(values)
    time = issue.call.times(ranks, is_end=not is_sent)
    return _MessageEnd(step, issue.call.node.id, int(time[0]), value)
