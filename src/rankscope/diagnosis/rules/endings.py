"""How a job ended: ranks that crashed, ranks that wait for others, ranks that never came.

Read from the records alone: what each rank did last, which calls it did not leave, in which
collective it stands, and which members of that collective's group did not issue it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, CheckContext, candidate_at
from rankscope.diagnosis.evidence.issuedcollectives import (
    IssuedCollective,
    issued_by_rank,
    issues_of,
    known_collectives,
    ranks_in_doubt,
)
from rankscope.diagnosis.evidence.stepview import Array, CallView, StepView, grouped
from rankscope.errors import TraceError
from rankscope.record.call import CallStatus
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, ranks_named, ranks_text
from rankscope.tree.crashes import Crash, crashes
from rankscope.tree.views import Trace

# ---- what each rank did last ---------------------------------------------------------------------


ORDERLY: Final = frozenset({EndReason.EXIT.value, EndReason.CLOSED.value})
"""How a stream ends whose rank ended by itself."""
PEER_LOST: Final = re.compile(
    r"timed? ?out|connection (closed|reset|refused)|broken pipe|closed by peer|Dist\w+Error|"
    r"gloo|NCCL|Watchdog",
    re.IGNORECASE,
)
"""What the exception of a rank says whose peer is gone or did not come: a consequence. These are
words of torch and its backends, which raise the same few classes for everything."""
CONNECTION_ENDED: Final = re.compile(
    r"connection (closed|reset)|broken pipe|closed by peer|remote process (exited|has)",
    re.IGNORECASE,
)
"""What it says where the peer's process has ended, and did not only fail to come."""
MOST_LISTED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCall:
    """What a rank did last."""

    step_view: StepView
    call: CallView
    innermost: CallView | None
    """The innermost call that it did not leave; None where it left all."""
    time_ns: int
    stack: tuple[str, ...]
    """Paths of the calls it did not leave, outermost first."""
    waiting: IssuedCollective | None


def last_calls(step_views: Sequence[StepView]) -> dict[int, LastCall]:
    """Return {rank: what it did last} in these steps."""
    last: dict[int, LastCall] = {}
    for step_view in step_views:
        issues = list(issues_of(step_view))
        latest: dict[int, tuple[int, CallView]] = {}
        opened: dict[int, list[tuple[int, int, CallView]]] = {}
        for number, call in enumerate(step_view.calls):
            times = call.times(call.ranks).tolist()
            at = dict(zip(call.ranks.tolist(), times))
            for rank, time_ns in at.items():
                if rank not in latest or time_ns >= latest[rank][0]:
                    latest[rank] = (time_ns, call)
            for outcome in () if call.node.has_returned else call.node.outcomes:
                for rank in outcome.ranks if outcome.status == CallStatus.UNFINISHED.word else ():
                    opened.setdefault(rank, []).append((at[rank], number, call))
        for rank, (time_ns, call) in latest.items():
            if rank in last and last[rank].time_ns > time_ns:
                continue
            stack = [each for _, _, each in sorted(opened.get(rank, ()), key=lambda o: o[:2])]
            last[rank] = LastCall(
                step_view=step_view,
                call=call,
                innermost=stack[-1] if stack else None,
                time_ns=time_ns,
                stack=tuple(dict.fromkeys(each.path for each in stack)),
                waiting=next((i for i in issues if _stands_in(i, rank)), None),
            )
    return last


def _stands_in(issue: IssuedCollective, rank: int) -> bool:
    """True where a rank did not come back from a collective, or came back without its peers."""
    return rank in issue.ranks and any(
        rank in outcome.ranks
        and (
            outcome.status == CallStatus.UNFINISHED.word
            or (outcome.status == CallStatus.RAISED.word and bool(PEER_LOST.search(outcome.error)))
        )
        for outcome in issue.call.node.outcomes
    )


def last_words(rank: int, each: LastCall) -> dict[str, Any]:
    """Return what the evidence of a finding says of one rank."""
    return {
        "rank": rank,
        "path": each.call.path,
        "phase": each.call.phase.word,
        "open": list(each.stack),
    }


# ---- hangs ---------------------------------------------------------------------------------------


_FEWEST_S: Final = 3.0
_TIMES_LONGEST: Final = 3.0
_MOST_TOLD: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hang:
    """Ranks that stand in a collective, and the members that did not come."""

    step_view: StepView
    issue: IssuedCollective
    """The first collective of the group to which the missing did not come."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def hangs_of(
    step_views: Sequence[StepView],
    last: dict[int, LastCall],
    ends: dict[int, str],
    stalls: list[dict[str, Any]],
) -> Iterator[Candidate]:
    """Yield the hangs in the last steps; `last` is what each rank did, `ends` how streams end."""
    hangs: list[_Hang] = []
    left_open = ranks_left_open(step_views, last, ends)
    for step_view in step_views:
        issues = [*known_collectives(step_view)]
        seen: set[tuple[str, int]] = set()
        for rank, each in sorted(last.items()):
            stands = each.waiting
            if each.step_view is not step_view or stands is None or stands.is_message:
                continue
            key = (stands.group, stands.sequence)
            if ends.get(rank) in ORDERLY or rank in left_open or key in seen:
                continue
            seen.add(key)
            hang = _hang(step_view, issues, stands, last)
            if hang is not None:
                hangs.append(hang)
    for hang in hangs:
        after = [h for h in hangs if h is not hang and _is_because_of(h, hang, step_views)]
        yield _hang_candidate(hang, after, last, stalls)


def ranks_left_open(
    step_views: Sequence[StepView], last: Mapping[int, LastCall], ends: Mapping[int, str]
) -> set[int]:
    """Return the ranks in a collective whose missing members are unknown: some fact is missing."""
    doubtful = set().union(*map(ranks_in_doubt, step_views))
    return {
        rank
        for rank, each in last.items()
        if (stands := each.waiting) is not None
        and not (stands.is_message or ends.get(rank) in ORDERLY)
        and (stands.lacks or not doubtful.isdisjoint(stands.members))
    }


def _is_because_of(later: _Hang, hang: _Hang, step_views: Sequence[StepView]) -> bool:
    """True where those who are missing in `later` wait in `hang`, and would come to it first."""
    if not set(later.missing) <= set(hang.waiting):
        return False
    one, other = hang.issue.call, later.issue.call
    for step_view in reversed(step_views):
        a, b = _same_call(step_view, one), _same_call(step_view, other)
        if a is not None and b is not None:
            common = np.intersect1d(a.ranks, b.ranks)[:1]
            if len(common):
                return bool(a.times(common) < b.times(common))
    calls = hang.step_view.calls
    return calls.index(one) < calls.index(other) if one in calls and other in calls else False


def _same_call(step_view: StepView, call: CallView) -> CallView | None:
    key = (call.phase, call.ordinal, call.micro_batch)
    named = step_view.named(call.path)
    return next((c for c in named if (c.phase, c.ordinal, c.micro_batch) == key), None)


def _hang(
    step_view: StepView,
    issues: list[IssuedCollective],
    stands: IssuedCollective,
    last: dict[int, LastCall],
) -> _Hang | None:
    group = [issue for issue in issues if issue.group == stands.group]
    came = {r for i in group if i.sequence == stands.sequence for r in i.ranks.tolist()}
    waiting = sorted(r for r in came if r in last and last[r].waiting is not None)
    elsewhere = {
        rank
        for rank, each in last.items()
        if each.waiting is not None
        and each.step_view is not step_view
        and each.waiting.group == stands.group
    }
    missed, missing = _first_missed(group, stands, waiting, elsewhere)
    if missed is None:
        return None
    left = [rank for rank in waiting if rank not in missing] or waiting
    return _Hang(step_view=step_view, issue=missed, waiting=tuple(left), missing=tuple(missing))


def _hang_candidate(
    hang: _Hang, after: list[_Hang], last: dict[int, LastCall], stalls: list[dict[str, Any]]
) -> Candidate:
    issue = hang.issue
    members, times = _when(hang, after, last)
    heard = [
        f"rank {r} was last in {last[r].call.path or '(root)'}" for r in hang.missing if r in last
    ]
    return candidate_at(
        hang.step_view,
        issue.call,
        Kind.HANG,
        issue.slot,
        hang.missing,
        f"{ranks_named(hang.waiting)} wait{'s' if len(hang.waiting) == 1 else ''} for "
        f"{ranks_named(hang.missing)}, who never came to this {issue.op} of "
        f"{ranks_named(sorted(issue.members))}{'; ' if heard else ''}{', '.join(heard[:4])}",
        evidence=lambda: {
            "waiting": [
                {
                    "rank": rank,
                    "path": each.waiting.call.path,
                    "collective": each.waiting.slot,
                    "op": each.waiting.op,
                    "group": each.waiting.group,
                }
                for rank, each in sorted(last.items())
                if each.waiting is not None
            ][:MOST_LISTED],
            "missing": ranks_text(hang.missing),
            "last": [last_words(r, each) for r, each in sorted(last.items())][:MOST_LISTED],
            **({"stalls": stalls} if stalls else {}),
        },
        members=members,
        times_ns=times,
        priority=-4,
    )


def _when(hang: _Hang, after: list[_Hang], last: dict[int, LastCall]) -> tuple[Array, Array]:
    """Return who is part of a hang, and since when. Who waits: since it came. Who is missing: after
    all it did, whose faults are the cause, but before what it waits in itself because of this hang.
    """
    issue = hang.issue
    there = np.array([r for r in hang.waiting if r in issue.ranks] or hang.waiting, np.int64)
    away = [rank for rank in hang.missing if rank in last]
    late = {rank: h.issue.call for h in after for rank in h.waiting}
    left = [
        int(late[rank].times(np.array([rank]))[0]) - 1 if rank in late else last[rank].time_ns + 2
        for rank in away
    ]
    times = np.concatenate([issue.call.times(there), np.array(left, np.int64)])
    return np.concatenate([there, np.array(away, np.int64)]), times


def _first_missed(
    group: list[IssuedCollective], stands: IssuedCollective, waiting: list[int], elsewhere: set[int]
) -> tuple[IssuedCollective | None, list[int]]:
    """Return the first collective that members did not come to, and those. A rank that skipped one
    may stand in the next as if it were this one: sites tell. Ranks `elsewhere` wait too."""
    lines: dict[int, list[IssuedCollective]] = {rank: [] for rank in stands.members}
    lines |= issued_by_rank(group)
    own = lines[waiting[0]] if waiting else lines[int(stands.ranks[0])]
    for place, issue in enumerate(own):
        there = {rank: line[place] for rank, line in lines.items() if len(line) > place}
        came = {r for r, i in there.items() if i.call is issue.call or i.site == issue.site}
        absent = [rank for rank in stands.members if rank not in elsewhere | came]
        if absent and len(absent) < len(stands.members):
            return issue, sorted(absent)
    return None, []


# ---- in a job that still runs --------------------------------------------------------------------


def without_recent(
    last: dict[int, LastCall],
    step_views: Sequence[StepView],
    context: CheckContext,
    read_s: float,
    at_s: float | None = None,
) -> dict[int, LastCall]:
    """Leave out, and tell of, ranks that came to their collective just before `at_s` (default: the
    reading of a job that goes on), less long ago than `_TIMES_LONGEST` of the longest stay."""
    issues = (issue for step_view in step_views for issue in issues_of(step_view))
    spans = (issue.call.span(issue.ranks) for issue in issues)
    longest_ns = max((int((ends - begins).max()) for begins, ends in spans), default=0)
    patience_s = max(_FEWEST_S, _TIMES_LONGEST * longest_ns / 1e9)
    now_s = read_s if at_s is None else at_s
    recent = {
        rank: (each.waiting, now_s - each.time_ns / 1e9)
        for rank, each in last.items()
        if each.waiting is not None and now_s - each.time_ns / 1e9 < patience_s
    }
    if at_s is None:
        context.coverage.notes.extend(_notes_on_waiting(recent, patience_s))
    return {rank: each for rank, each in last.items() if rank not in recent}


def _notes_on_waiting(
    waiting: Mapping[int, tuple[IssuedCollective, float]], patience_s: float
) -> Iterator[str]:
    """Yield a line for each collective with an unusual stay, in s, that is below `patience_s`."""
    alike = grouped(
        ((issue.op, issue.call.path or "(root)"), rank)
        for rank, (issue, _) in sorted(waiting.items())
    )
    for (op, path), ranks in [*alike.items()][:_MOST_TOLD]:
        waited_s = max(waiting[rank][1] for rank in ranks)
        if waited_s >= patience_s / _TIMES_LONGEST:
            yield (
                f"{ranks_named(ranks)} {'has' if len(ranks) == 1 else 'have'} been in {op} of "
                f"{path} for {waited_s:.1f} s; in this job that is a "
                f"hang after {patience_s:.1f} s: ask again"
            )


# ---- ends ----------------------------------------------------------------------------------------


MOST_STALLS: Final = 16
_NAMELESS: Final = "an exception outside of any module's call"


def ends_of(trace: Trace) -> dict[int, str]:
    """Return {rank: how its last stream ends}."""
    return {rank["rank"]: str(rank["end"]) for rank in trace.completeness["ranks"]}


def ended_badly(
    trace: Trace, context: CheckContext, step_views: Sequence[StepView]
) -> Iterator[Candidate]:
    """Yield the hangs and crashes that the last steps of the last incarnation show."""
    ends = ends_of(trace)
    last = last_calls(step_views)
    ended = trace.run.get("ended")
    if trace.is_live or ended is not None:
        at = (ended or {}).get("at")
        at_s = None if at is None else _seconds(trace, at)
        last = without_recent(last, step_views, context, trace.read_s, at_s)
    unrecorded = _unrecorded(trace, last)
    # what others wait for may be what a full spool had no room for
    may_be_left = ended is None and not trace.stalls
    killed = _killed(trace, ends) if may_be_left else {}
    are_left = may_be_left and (bool(killed) or _are_left(last, ends))
    hangs = [] if unrecorded or are_left else list(hangs_of(step_views, last, ends, _stalls(trace)))
    yield from hangs
    if ended is None:  # else no rank failed: the job was ended from outside
        is_open = not killed and bool(ranks_left_open(step_views, last, ends))
        is_explained = bool(hangs) or is_open
        yield from _crashes(trace, last, unrecorded, killed, is_explained=is_explained)


def _stalls(trace: Trace) -> list[dict[str, Any]]:
    """Return the last stall of each host: no verdict (a first step may compile for ten minutes),
    but it says since when, which records cannot."""
    now_ns = time.time_ns() if trace.is_live else None
    latest = {stall.host: stall for stall in trace.stalls}
    return [stall.as_evidence(now_ns) for _, stall in sorted(latest.items())][:MOST_STALLS]


def _killed(trace: Trace, ends: Mapping[int, str]) -> dict[int, str]:
    """Return {rank: signal} of those killed before any failed: the launcher ended the others."""
    noted = {int(each["rank"]): str(each["by"]) for each in trace.run.get("killed", ())}
    return {rank: by for rank, by in noted.items() if ends.get(rank) == EndReason.LOST.value}


def _are_left(last: Mapping[int, LastCall], ends: Mapping[int, str]) -> bool:
    """True where nobody stands any more: a rank is lost, and all that waited raised."""
    waiting = [(rank, call.waiting.call.node) for rank, call in last.items() if call.waiting]
    return EndReason.LOST.value in ends.values() and all(
        any(rank in o.ranks and CONNECTION_ENDED.search(o.error) for o in node.outcomes)
        for rank, node in waiting
    )


def _seconds(trace: Trace, at: object) -> float:
    """Return a time of the header.

    Raises:
        TraceError: it is none.
    """
    try:
        return datetime.fromisoformat(str(at)).timestamp()
    except ValueError as error:
        raise TraceError(
            f"{trace.path}: ended at {str(at)[:60]!r}: the trace is damaged"
        ) from error


def _unrecorded(trace: Trace, last: dict[int, LastCall]) -> dict[int, str]:
    """Return {rank: the step} from which on its spool was full, so that its end is not recorded."""
    of_last_life = {rank["rank"]: rank.get("full_from") for rank in trace.completeness["ranks"]}
    return {
        rank: f"{since['mode']} step {since['step']}"
        for rank, since in of_last_life.items()
        if since is not None and not _is_behind(last.get(rank), since)
    }


def _is_behind(call: LastCall | None, since: Mapping[str, Any]) -> bool:
    """True where later steps are recorded: those already written make room in the spool again."""
    if call is None:
        return False
    step = call.step_view
    return step.mode.word == since["mode"] and step.step > int(since["step"])


# ---- crashes -------------------------------------------------------------------------------------


def _crashes(
    trace: Trace,
    last: dict[int, LastCall],
    unrecorded: dict[int, str],
    killed: Mapping[int, str],
    *,
    is_explained: bool,
) -> Iterator[Candidate]:
    """Yield ranks that raised, or were killed while others went on; `is_explained` by a hang."""
    # One crash ends a whole job: peers raise because it is gone ("connection closed"), and the
    # launcher kills the rest. Only ranks that no other rank ended may be named. What is asked comes
    # in the order of trust: (1) exceptions that do not speak of a lost peer; (2) where those do not
    # say what they were, who stopped before the others did, by the calls that others went on with;
    # (3) killed ranks, where (1) and (2) name nobody that raised and some rank was not killed: were
    # all gone, the whole job was ended from outside. Where a hang was found (`is_explained`), the
    # ranks that were killed or lost a peer ended because of it, and are not named.
    ends = ends_of(trace)
    in_order = {rank: call for rank, call in last.items() if rank not in unrecorded}
    incarnations = {rank["rank"]: rank["incarnation"] for rank in trace.completeness["ranks"]}
    errors = {c.rank: _end_of(c) for c in crashes(trace) if c.incarnation == incarnations[c.rank]}
    raised = {rank for rank, end in ends.items() if end == EndReason.RAISED.value}
    ranks_of = grouped((errors.get(rank, _UNKNOWN), rank) for rank in sorted(raised))
    own = {end: ranks for end, ranks in ranks_of.items() if not end.is_consequence}
    lost = [rank for rank, end in ends.items() if end == EndReason.LOST.value]
    if killed and own.keys() <= {_UNKNOWN}:
        own, lost = {}, [*killed]
    if not (own or lost or is_explained):
        own = ranks_of
    if own.keys() == {_UNKNOWN}:
        # None of them says why: those that others left behind went first. Where that leaves out the
        # ranks that raised, the killed ones are named below, and not they.
        first = _stopped_first([*own[_UNKNOWN], *lost], in_order)
        alone = [rank for rank in first if rank in raised]
        left = [in_order[rank].call for rank in own[_UNKNOWN] if rank in in_order]
        if first:
            own = {_UNKNOWN: alone} if alone else {}
            lost = [rank for rank in first if rank in lost]
        elif at := [r for r in lost if r in in_order and in_order[r].call in left]:
            doubt = f"{_NAMELESS}; {ranks_named(at)}, last in the same place, may have gone first"
            own = {replace(_UNKNOWN, text=doubt): own[_UNKNOWN]}
    for end, ranks in own.items():
        yield from _crash(ranks, end, last, ends)
    if lost and not own and not is_explained and len(lost) < len(ends):
        call = last[lost[0]].call if lost[0] in last else None
        how = sorted(set(killed.values()))
        text = "gone without an exception: killed by a signal, aborted, or left by os._exit"
        text = f"killed by {' and '.join(how)}, before any other rank failed" if how else text
        if lost[0] in unrecorded:
            text += f"; its spool was full, nothing is recorded of it from {unrecorded[lost[0]]} on"
        gone = replace(_UNKNOWN, path=call.path if call else "", text=text)
        yield from _crash(lost, gone, last, ends, call)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How an exception ended a rank."""

    path: str
    """Of the innermost call it left, "" outside of all."""
    phase: Phase | None
    text: str
    is_consequence: bool = False
    """It says that a peer is gone."""


_UNKNOWN: Final = _End(path="", phase=None, text=_NAMELESS)


def _end_of(crash: Crash) -> _End:
    return _End(
        path=crash.path or "",
        phase=crash.phase,
        text=crash.sentence,
        is_consequence=any(PEER_LOST.search(text) for text in (crash.error, *crash.causes)),
    )


def _stopped_first(ranks: list[int], last: dict[int, LastCall]) -> list[int]:
    """Return the ranks that others left behind and that left nobody behind: they ended first."""

    def is_past(one: int, other: int) -> bool:
        call = last[other].call
        if one not in call.ranks:
            return False
        return bool(call.times(np.array([one]))[0] < last[one].time_ns)

    stopped = [rank for rank in ranks if rank in last and last[rank].waiting is None]
    return [
        rank
        for rank in stopped
        if any(is_past(other, rank) for other in last)
        and not any(is_past(rank, other) for other in last)
    ]


def _crash(
    ranks: list[int],
    end: _End,
    last: dict[int, LastCall],
    ends: dict[int, str],
    call: CallView | None = None,
) -> Iterator[Candidate]:
    recorded = [rank for rank in ranks if rank in last]
    if not recorded:
        return
    each = last[recorded[0]]
    yield candidate_at(
        each.step_view,
        call or _call_left(each, recorded[0], end),
        Kind.CRASH,
        "",
        ranks,
        f"{ranks_named(ranks)}: {end.text}",
        evidence=lambda: {
            "last": [last_words(rank, last[rank]) for rank in recorded][:MOST_LISTED],
            "ends": {str(rank): end for rank, end in sorted(ends.items())[:MOST_LISTED]},
        },
        members=np.array(recorded, np.int64),
        times_ns=np.array([last[rank].time_ns for rank in recorded], np.int64) + 1,
        path=end.path,
    )


def _call_left(each: LastCall, rank: int, end: _End) -> CallView:
    """Return the call that an exception left; outside of all, the last that was no collective: that
    has the path of a module, and is no place to look for its crash."""
    own = [call for call in each.step_view.calls if rank in call.ranks]
    left = [call for call in own if call.path == end.path and call.phase is end.phase]
    if left:
        return left[-1]
    calls = [call for call in own if call.phase is not Phase.COLLECTIVE]
    at = np.array([rank])
    return max(calls, key=lambda c: int(c.times(at)[0]), default=each.call)
