"""Which faults are origins, which are victims of another, and the report that says so.

On one rank everything has an order. Between ranks there is only what joins them: a collective ends
nowhere before every member has come, a message is not there before it was sent. Reductions of
gradients run in C++ and leave no record, so the gradients before an optimizer step join the ranks
that hold parts or replicas of a parameter. A fault reaches a later one where a chain of joins leads
to it; a fault that no other reaches is an origin. Clocks of different ranks are not compared.

**Messages** may join two steps: a stage receives before its own step begins, so its receive may be
recorded a step before the send. The k-th receive of a channel (a pair of ranks, a group and a tag)
took its k-th send, counted since a point that all ranks have in common. Nothing is paired where a
rank had not seen every message since one, nor where receives fit the sends better with an offset
than without: then the numbers are wrong, not the values. Behind a step that was not traced a
receive may have been posted in it: there one message of the channel has to have come as sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.diagnosis.context import (
    SETUP_STEP,
    Candidate,
    CheckContext,
    History,
    JudgedStep,
)
from rankscope.diagnosis.coverage import Coverage
from rankscope.diagnosis.events import alike, told_once
from rankscope.diagnosis.evidence.issuedcollectives import (
    IssuedCollective,
    equal_by_offset,
    fits_shifted,
    issues_of,
    known_collectives,
    ranks_in_doubt,
)
from rankscope.diagnosis.evidence.stages import stage_edges
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped
from rankscope.record.finding import (
    NAMED_VICTIMS,
    Finding,
    Kind,
    Report,
    Severity,
    Skipped,
    Verdict,
)
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.texts import NO_STEP
from rankscope.record.value import ValueFlag
from rankscope.tree.views import Trace

_ONE_WAY: Final = {"broadcast", "scatter"}
_TO_ONE: Final = {"reduce", "gather", "gather_into_tensor"}


def joins_of(
    step_view: JudgedStep, is_one: Callable[[StepView, IssuedCollective], bool]
) -> Iterator[Join]:
    """Yield the joints of one step but for messages; `is_one` says what is one collective."""
    for issue in known_collectives(step_view):
        ranks = issue.ranks
        if len(ranks) < 2 or not is_one(step_view, issue):
            continue
        begins, ends = issue.call.span(ranks)
        ends = np.maximum(ends, begins + 1)
        all_ranks = np.ones(len(ranks), bool)
        gives = ranks == issue.facts.get("src") if issue.op in _ONE_WAY else all_ranks
        takes = ranks == issue.facts.get("dst") if issue.op in _TO_ONE else all_ranks
        if not gives.any() or not takes.any():
            gives = takes = all_ranks
        yield Join(givers=ranks[gives], begins=begins[gives], takers=ranks[takes], ends=ends[takes])
    for edge in stage_edges(step_view):
        sender, receiver = np.array([edge.sender]), np.array([edge.receiver])
        for micro in edge.sent.keys() & edge.taken.keys():
            (sent, number), (received, taken_number) = edge.sent[micro], edge.taken[micro]
            if number == taken_number:
                begins, ends = sent.times(sender), received.times(receiver)
                yield Join(givers=sender, begins=begins, takers=receiver, ends=ends)
    joined: set[bytes] = set()
    for values in step_view.values(Phase.GRADS):
        meshes = [np.sort(np.array(m.ranks, np.int64)) for v in values.views for m in v.meshes]
        groups = meshes or list(step_view.life.replicas.lines)
        if not groups and values.agree(values.ranks):
            groups = [values.ranks]
        for group in groups:
            ranks = group[np.isin(group, values.ranks)]
            if len(ranks) < 2 or ranks.tobytes() in joined:
                continue
            if meshes or values.agree(ranks) is not False:
                joined.add(ranks.tobytes())
                times = values.call.times(ranks) - 1
                yield Join(givers=ranks, begins=times, takers=ranks, ends=times)


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
    """(incarnation, point, group, rank) that received from anybody: no later send is known."""
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
        """Yield the order of events on two ranks that every message shows."""
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


# ---- order of causes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """What was before it on any of `givers` is before what comes after it on all of `takers`."""

    givers: Array
    begins: Array
    """Per sender, ns on its own clock."""
    takers: Array
    ends: Array
    """Per receiver, ns on its own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlace:
    """A fault on some ranks, and when on each."""

    ranks: Array
    times_ns: Array

    @property
    def first_ns(self) -> int:
        """When it was first seen; 0 where no rank was recorded."""
        return int(self.times_ns.min()) if len(self.times_ns) else 0


@dataclass(slots=True, kw_only=True)
class CauseOrder:
    """Which faults are origins."""

    origin_of: list[int | None]
    """Per place the origin that reaches it; None for origins."""
    unordered: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of origins without a common rank or a chain between them."""


def _reached_from(place: FaultPlace, joins: Sequence[Join], size: int) -> Array:
    """Return [size] per rank the first moment that a fault can have touched."""
    reached = np.full(size, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(reached, place.ranks, place.times_ns)
    while True:
        before = reached.copy()
        for join in joins:
            if (reached[join.givers] <= join.begins).any():
                np.minimum.at(reached, join.takers, join.ends)
        if (before == reached).all():
            return reached


def _limits_of(place: FaultPlace, joins: Sequence[Join], size: int) -> Array:
    """Return [size] per rank the moment before which a fault can have touched the place."""
    limit = np.full(size, np.iinfo(np.int64).min, np.int64)
    np.maximum.at(limit, place.ranks, place.times_ns)
    while True:
        before = limit.copy()
        for join in reversed(joins):
            if (join.ends < limit[join.takers]).any():
                np.maximum.at(limit, join.givers, join.begins + 1)
        if (before == limit).all():
            return limit


def sort_causes(places: Sequence[FaultPlace], joins: Sequence[Join]) -> CauseOrder:
    """Return which of these faults are origins, and which origin reaches each other one.

    Args:
        places: the faults, in any order.
        joins: in any order (near the order of time is faster).
    """
    size = 1 + max((int(place.ranks.max()) for place in places if len(place.ranks)), default=0)
    size = max(size, *(1 + int(max(j.givers.max(), j.takers.max())) for j in joins), 0)
    origin_of: list[int | None] = [None] * len(places)
    unsorted = sorted(range(len(places)), key=lambda index: places[index].first_ns)
    origins: list[int] = []
    while unsorted:
        origin = _minimal(unsorted, places, joins, size)
        reached = _reached_from(places[origin], joins, size)
        unreached = []
        for index in unsorted:
            place = places[index]
            is_after = bool((reached[place.ranks] < place.times_ns).any())
            if is_after and index != origin and not _is_mutual(places[origin], place):
                origin_of[index] = origin
            elif index != origin:
                unreached.append(index)
        unsorted = unreached
        origins.append(origin)
    unordered = [
        (a, b)
        for a, b in itertools.combinations(origins, 2)
        if not np.isin(places[a].ranks, places[b].ranks).any()
    ]
    return CauseOrder(origin_of=origin_of, unordered=unordered)


def _minimal(
    unsorted: Sequence[int], places: Sequence[FaultPlace], joins: Sequence[Join], size: int
) -> int:
    """Return one that no other reaches: begin with the first by clock, go back to its causes."""
    earliest = unsorted[0]
    visited = {earliest}
    while True:
        limit = _limits_of(places[earliest], joins, size)
        for index in unsorted:
            place = places[index]
            is_before = index not in visited and (place.times_ns < limit[place.ranks]).any()
            if is_before and not _is_mutual(place, places[earliest]):
                earliest = index
                visited.add(index)
                break
        else:
            return earliest


def _is_mutual(first: FaultPlace, second: FaultPlace) -> bool:
    """True where each is before the other on some rank: they are one fault."""
    _, at, places = np.intersect1d(first.ranks, second.ranks, return_indices=True)
    gaps = second.times_ns[places] - first.times_ns[at]
    return bool((gaps > 0).any() and (gaps < 0).any())


# ---- report --------------------------------------------------------------------------------------


_MOST_EVENTS = 2_000
"""Events that are put in order; what comes later by clock than that many counts as a victim."""
_MOST_TOLD: Final = 200
"""Victims with evidence, the first by clock: nobody reads thousands."""
_HANDED_UNEQUAL: Final = (
    "What came in already differs on these ranks. Look at what ran before it, in backward at what "
    "stands behind it in the model: the data, the loss, code between modules, hooks, weights."
)


def made_report(
    trace: Trace,
    context: CheckContext,
    candidates: Sequence[Candidate],
    joins: Sequence[Join],
    histories: Mapping[int, History],
) -> Report:
    """Return the report of these candidates; a history is that of an incarnation behind its last
    step."""
    distinct: dict[Any, Candidate] = {}
    for fault in (c for c in candidates if c.severity is Severity.FAULT):
        # what repeats another of its place is left out; ranks crash at one place each by itself
        key = (fault.where, fault.ranks if fault.kind is Kind.CRASH else ())
        if key not in distinct or fault.priority < distinct[key].priority:
            distinct[key] = fault
    is_whole = trace.run.get("settings", {}).get("paths", "*") == "*"
    even = {life: history.even for life, history in histories.items()} if is_whole else {}
    findings = _ordered([*distinct.values()], joins, even, trace)
    warnings = (c for c in candidates if c.severity is Severity.WARNING)
    findings += [
        told_once(trace, [_finding(warning, is_origin=False, victims=[]) for warning in event])
        for event in alike(warnings)
    ]
    coverage, declared = context.coverage, context.layouts.declared
    globs = [
        {note.fields["glob"]: note for note in notes if note.kind is NoteKind.UNMATCHED_GLOB}
        for notes in trace.error_notes
    ]
    unmatched = [str(n) for glob, n in globs[0].items() if all(glob in g for g in globs[1:])]
    problem = "" if findings else _lacks(trace, coverage, unmatched)
    return Report(
        command="check",
        verdict=verdict_of(findings, problem, is_complete=trace.is_complete),
        compared=coverage.compared,
        skipped=tuple(Skipped(reason=r, count=n) for r, n in sorted(coverage.skipped.items())),
        recorded=coverage.recorded,
        alone=coverage.compared - coverage.with_others,
        undeclared=coverage.undeclared,
        undeclared_names=coverage.undeclared_names,
        findings=tuple(findings),
        notes=(*unmatched, *coverage.unjudged(), *coverage.notes),
        lacks=problem,
        layout=declared.name if declared else str(trace.run.get("layout", {}).get("file", "")),
        is_live=trace.is_live,
    )


def verdict_of(findings: Sequence[Finding], problem: str, *, is_complete: bool) -> Verdict:
    """Return the word for what was found, `lacks` being why nothing could be judged."""
    if any(finding.severity is Severity.FAULT for finding in findings):
        return Verdict.FAULT
    return Verdict.INCOMPLETE if problem or not is_complete else Verdict.CLEAN


def _lacks(trace: Trace, coverage: Coverage, unmatched: Sequence[str]) -> str:
    """Return why nothing was judged, and what to do; "" where something was."""
    if unmatched and not coverage.is_any_inside:
        return f"{unmatched[0]}: trace again with globs of whole paths ('*.name', 'layers.0.*')"
    lacking = (NoteKind.NO_STEP_REACHED, NoteKind.NO_STEP_BEGUN)
    is_lacking = any(note.kind in lacking for notes in trace.error_notes for note in notes)
    if not trace.steps and (is_lacking or not coverage.compared):
        return f"{NO_STEP}: choose steps that the job reaches (--rs-steps)"
    if coverage.compared:
        return ""
    if not coverage.recorded:
        return "no value was recorded: trace again with --rs-digest full and --rs-phases all"
    return "none of its values has numbers to judge: trace again with --rs-digest full"


def _ordered(
    faults: list[Candidate],
    joins: Sequence[Join],
    even: Mapping[int, frozenset[int]],
    trace: Trace,
) -> list[Finding]:
    """Return findings, origins first, each followed in the list by nothing that caused it.

    Args:
        even: per incarnation the steps behind which ranks hold the same (`History.even`).
    """
    events = grouped(((s.members.tobytes(), s.times_ns.tobytes()), s) for s in faults)
    in_time = sorted(events.values(), key=lambda event: event[0].first_ns)
    near, far = in_time[:_MOST_EVENTS], in_time[_MOST_EVENTS:]
    order = _between_even_steps(near, joins, even)
    victims: dict[int, list[Candidate]] = {}
    for index, origin in enumerate(order.origin_of):
        if origin is not None:
            victims.setdefault(origin, []).extend(near[index])
    origins = [index for index, origin in enumerate(order.origin_of) if origin is None]
    if origins:
        victims.setdefault(origins[0], []).extend(fault for event in far for fault in event)
    findings, siblings = [], []
    for index in origins:
        numbers = sorted({b if a == index else a for a, b in order.unordered if index in (a, b)})
        firsts = [near[number][0] for number in numbers[:4]]
        names = [f"{fault.place} ({ranks_named(fault.ranks)})" for fault in firsts]
        caused = victims.get(index, [])
        for event in alike(near[index]):
            first = _finding(event[0], is_origin=True, victims=caused, unordered=names)
            alike_findings = [_finding(fault, is_origin=False, victims=[]) for fault in event[1:]]
            findings.append(told_once(trace, [first, *alike_findings]))
            siblings += alike_findings
    later = sorted((f for faults in victims.values() for f in faults), key=lambda f: f.first_ns)
    later_findings = (
        _finding(fault, is_origin=False, victims=[], has_evidence=number < _MOST_TOLD)
        for number, fault in enumerate(later)
    )
    return [*findings, *siblings, *later_findings]


_OF_VALUES: Final = frozenset(
    {Kind.REPLICA, Kind.PLACEMENT, Kind.GRADIENT, Kind.RECOMPUTE, Kind.NONFINITE}
)
"""What goes on in values alone: groups, an order of collectives and missing calls may go on though
parameters are equal."""
_ENDS: Final = (Kind.HANG, Kind.CRASH, Kind.GROUP)


def _between_even_steps(
    events: Sequence[Sequence[Candidate]], joins: Sequence[Join], even: Mapping[int, frozenset[int]]
) -> CauseOrder:
    """Return which events are origins. Where all ranks hold the same finite parameters and buffers
    between two steps, values of the earlier one are no cause of the later one's: an event there is
    an origin of its own, unless its place was wrong before, so that it is the same again."""

    def sorted_of(indices: Sequence[int]) -> CauseOrder:
        firsts = [events[index][0] for index in indices]
        return sort_causes(
            [FaultPlace(ranks=c.members, times_ns=c.times_ns) for c in firsts], joins
        )

    def part_of(index: int) -> tuple[int, int]:
        life, step = events[index][0].incarnation, _step(events[index][0])
        return life, sum(number < step for number in even.get(life, ()))

    def is_cut(cause: int, index: int) -> bool:
        (life, before), (other_life, part) = part_of(cause), part_of(index)
        is_of_values = all(fault.kind in _OF_VALUES for fault in events[cause])
        return life == other_life and before < part and is_of_values

    order = sorted_of(range(len(events)))
    detached = grouped(
        (part_of(index), index)
        for index, origin in enumerate(order.origin_of)
        if origin is not None and is_cut(origin, index)
        if all(fault.kind not in _ENDS for fault in events[index])
    )
    for _, indices in sorted(detached.items()):
        origins = [index for index, origin in enumerate(order.origin_of) if origin is None]
        chosen = [*(o for o in origins if not is_cut(o, indices[0])), *indices]
        causes = [None if n is None else chosen[n] for n in sorted_of(chosen).origin_of]
        first_step = min(_step(events[index][0]) for index in indices)
        earlier_places = {_where(f) for event in events for f in event if _step(f) < first_step}
        for index, cause in list(zip(chosen, causes))[-len(indices) :]:
            event = events[index if cause is None else cause]
            if cause in origins or not any(_where(fault) in earlier_places for fault in event):
                order.origin_of[index] = cause
    return order


def _step(fault: Candidate) -> int:
    return SETUP_STEP if fault.phase is Phase.SETUP else fault.step


def _where(fault: Candidate) -> tuple[Any, ...]:
    return (fault.incarnation, fault.mode, fault.phase, fault.path, fault.slot)


def _finding(
    candidate: Candidate,
    *,
    is_origin: bool,
    victims: list[Candidate],
    unordered: Sequence[str] = (),
    has_evidence: bool = True,
) -> Finding:
    evidence = dict(candidate.make_evidence()) if has_evidence else {}
    if unordered:
        evidence["unordered"] = list(unordered)
    if candidate.incarnation:
        evidence["incarnation"] = candidate.incarnation
    in_time = sorted(victims, key=lambda victim: victim.first_ns)
    advice = candidate.advice or candidate.kind.advice
    if candidate.kind is Kind.REPLICA and not candidate.advice:
        facts = candidate.phase.facts
        advice = _HANDED_UNEQUAL if candidate.slot.startswith(facts.handed) else facts.unequal
    facts_of_finding = {
        "is_origin": is_origin,
        "victims": sum(victim.weight for victim in victims) + candidate.weight - 1,
        "victim_names": tuple(dict.fromkeys(victim.place for victim in in_time))[:NAMED_VICTIMS],
        "evidence": evidence,
        "message": f"{candidate.place}: {candidate.message}",
        "advice": advice,
    }
    copied = {column.name: getattr(candidate, column.name) for column in fields(Finding)}
    return Finding(**copied | facts_of_finding)
