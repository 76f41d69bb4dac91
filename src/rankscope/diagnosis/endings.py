"""How a job ended: ranks that crashed, ranks that wait for others, ranks that never came.

Read from the records alone: what each rank did last, which calls it did not leave, in which
collective it stands, and which members of that collective's group did not issue it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.issuedcollectives import MESSAGES, IssuedCollective, issues_of
from rankscope.diagnosis.stepview import CallView, StepView
from rankscope.record.call import CallStatus, Phase
from rankscope.record.finding import Kind
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.streams import EndReason
from rankscope.tree.crashes import Crash, crashes
from rankscope.tree.views import Trace

__all__ = ["Patience", "ended_badly", "is_in_order"]
_FEWEST_S: Final = 3.0
_TIMES_LONGEST: Final = 3.0
_MOST_TOLD: Final = 4


class Patience:
    """Three times as long as any rank stood in one in the last steps, and 3 s at least."""

    def __init__(self, step_views: Sequence[StepView], context: CheckContext) -> None:
        """Look at the last steps. `step_views`: these."""
        longest_ns = 0
        for step_view in step_views:
            for issue in issues_of(step_view):
                begins, ends = context.clock.span(issue.call, issue.ranks)
                longest_ns = max(longest_ns, int((ends - begins).max()))
        self.seconds = max(_FEWEST_S, _TIMES_LONGEST * longest_ns / 1e9)
        self._now_s = time.time()

    def is_over(self, since_ns: int) -> bool:
        """True for a rank that has stood there for longer."""
        return self._now_s - since_ns / 1e9 >= self.seconds

    def notes(self, waiting: Mapping[int, tuple[IssuedCollective, int]]) -> Iterator[str]:
        """Yield a line for each collective in which ranks stand for longer than any did before, but
        not for long enough.

        Args:
            waiting: rank -> the collective, and since when.
        """
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, (issue, _) in sorted(waiting.items()):
            alike.setdefault((issue.op, issue.call.path or "(root)"), []).append(rank)
        for (op, path), ranks in [*alike.items()][:_MOST_TOLD]:
            waited_s = self._now_s - min(waiting[rank][1] for rank in ranks) / 1e9
            if waited_s < self.seconds / _TIMES_LONGEST:
                continue
            yield (
                f"{ranks_named(ranks)} {'has' if len(ranks) == 1 else 'have'} been in {op} of "
                f"{path} for {waited_s:.1f} s; in this job that is a "
                f"hang after {self.seconds:.1f} s: ask again"
            )


Array = NDArray[Any]
_ORDERLY: Final = frozenset({EndReason.EXIT.value, EndReason.CLOSED.value})
_PEER_LOST: Final = re.compile(
    r"timed? ?out|connection (closed|reset|refused)|broken pipe|closed by peer|Dist\w+Error|"
    r"gloo|NCCL|Watchdog",
    re.IGNORECASE,
)
"""What the exception of a rank says whose peer is gone or did not come: a consequence. These are
words of torch and its backends, which raise the same few classes for everything."""
_NAMELESS: Final = "an exception outside of any module's call"
_MOST_LISTED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """What a rank did last."""

    step_view: StepView
    call: CallView
    """The call it entered last."""
    time_ns: int
    stack: tuple[str, ...]
    """Paths of the calls it did not leave, outermost first."""
    waiting: IssuedCollective | None
    """The collective it stands in."""
    error: str


def is_in_order(trace: Trace) -> bool:
    """True where every rank's last incarnation ended by itself."""
    return all(how in _ORDERLY for how in _ends(trace).values())


def _ends(trace: Trace) -> dict[int, str]:
    return {rank["rank"]: str(rank["end"]) for rank in trace.completeness["ranks"]}


def ended_badly(
    trace: Trace, context: CheckContext, step_views: Sequence[StepView]
) -> Iterator[Candidate]:
    """Yield a candidate for every hang and crash.

    Args:
        trace: the trace.
        context: what is known beyond one step.
        step_views: the last steps of the last incarnation.
    """
    ends = _ends(trace)
    last = _last_of(step_views, context)
    if trace.is_live:
        last = _without_recent(last, step_views, context)
    hangs = list(_hangs(step_views, context, last, ends))
    yield from hangs
    yield from _crashes(trace, context, last, ends, is_explained=bool(hangs))


def _without_recent(
    last: dict[int, _Last], step_views: Sequence[StepView], context: CheckContext
) -> dict[int, _Last]:
    """Leave out, and tell of, ranks that came to their collective just now."""
    patience = Patience(step_views, context)
    recent = {
        rank: (each.waiting, each.time_ns)
        for rank, each in last.items()
        if each.waiting is not None and not patience.is_over(each.time_ns)
    }
    context.coverage.notes.extend(patience.notes(recent))
    return {rank: each for rank, each in last.items() if rank not in recent}


# ---- what ranks did last -------------------------------------------------------------------------


def _last_of(step_views: Sequence[StepView], context: CheckContext) -> dict[int, _Last]:
    found: dict[int, _Last] = {}
    for step_view in step_views:
        issues = list(issues_of(step_view))
        latest: dict[int, tuple[int, CallView]] = {}
        opened: dict[int, list[tuple[int, str]]] = {}
        errors: dict[int, str] = {}
        for call in step_view.calls:
            times = context.clock.of_call(call, call.ranks).tolist()
            at = dict(zip(call.ranks.tolist(), times))
            for rank, time_ns in at.items():
                if rank not in latest or time_ns >= latest[rank][0]:
                    latest[rank] = (time_ns, call)
            for outcome in () if call.node.has_returned else call.node.outcomes:
                for rank in outcome.ranks:
                    if outcome.status == CallStatus.UNFINISHED.word:
                        opened.setdefault(rank, []).append((at[rank], call.path))
                    elif outcome.status == CallStatus.RAISED.word:
                        errors[rank] = outcome.error
        for rank, (time_ns, call) in latest.items():
            if rank in found and found[rank].time_ns > time_ns:
                continue
            found[rank] = _Last(
                step_view=step_view,
                call=call,
                time_ns=time_ns,
                stack=tuple(dict.fromkeys(path for _, path in sorted(opened.get(rank, ())))),
                waiting=next((i for i in issues if _stands_in(i, rank)), None),
                error=errors.get(rank, ""),
            )
    return found


def _stands_in(issue: IssuedCollective, rank: int) -> bool:
    """True where a rank did not come back from a collective, or came back without its peers."""
    if rank not in issue.ranks:
        return False
    return any(
        rank in outcome.ranks
        and (
            outcome.status == CallStatus.UNFINISHED.word
            or (outcome.status == CallStatus.RAISED.word and bool(_PEER_LOST.search(outcome.error)))
        )
        for outcome in issue.call.node.outcomes
    )


# ---- hangs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hang:
    """Ranks that stand in a collective, and the members that did not come."""

    step_view: StepView
    issue: IssuedCollective
    """The first collective of the group to which the missing did not come."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def _hangs(
    step_views: Sequence[StepView],
    context: CheckContext,
    last: dict[int, _Last],
    ends: dict[int, str],
) -> Iterator[Candidate]:
    found: list[_Hang] = []
    for step_view in step_views:
        issues = [i for i in issues_of(step_view) if i.op not in MESSAGES]
        seen: set[tuple[str, int]] = set()
        for rank, each in sorted(last.items()):
            stands = each.waiting
            if each.step_view is not step_view or stands is None or stands.op in MESSAGES:
                continue
            key = (stands.group, stands.sequence)
            if ends.get(rank) in _ORDERLY or key in seen:
                continue
            seen.add(key)
            hang = _hang(step_view, issues, stands, last)
            if hang is not None:
                found.append(hang)
    for hang in found:
        after = [h for h in found if h is not hang and _is_because_of(h, hang, step_views, context)]
        yield _hang_candidate(context, hang, after, last)


def _is_because_of(
    later: _Hang, hang: _Hang, step_views: Sequence[StepView], context: CheckContext
) -> bool:
    """True where those who are missing in `later` wait in `hang`, and would come to it first."""
    if not set(later.missing) <= set(hang.waiting):
        return False
    one, other = hang.issue.call, later.issue.call
    for step_view in reversed(step_views):
        a, b = _same_call(step_view, one), _same_call(step_view, other)
        common = np.intersect1d(a.ranks, b.ranks)[:1] if a and b else None
        if a is not None and b is not None and common is not None and len(common):
            return bool(context.clock.of_call(a, common) < context.clock.of_call(b, common))
    calls = hang.step_view.calls
    return calls.index(one) < calls.index(other) if one in calls and other in calls else False


def _same_call(step_view: StepView, call: CallView) -> CallView | None:
    alike = (
        each
        for each in step_view.named(call.path)
        if (each.phase, each.ordinal, each.micro_batch)
        == (call.phase, call.ordinal, call.micro_batch)
    )
    return next(alike, None)


def _hang(
    step_view: StepView,
    issues: list[IssuedCollective],
    stands: IssuedCollective,
    last: dict[int, _Last],
) -> _Hang | None:
    """Return who did not come to the collective in which ranks stand."""
    group = [issue for issue in issues if issue.group == stands.group]
    came = {r for i in group if i.sequence == stands.sequence for r in i.ranks.tolist()}
    waiting = sorted(r for r in came if r in last and last[r].waiting is not None)
    missed, missing = _first_missed(group, stands, waiting)
    if missed is None:
        return None
    left = [rank for rank in waiting if rank not in missing] or waiting
    return _Hang(step_view=step_view, issue=missed, waiting=tuple(left), missing=tuple(missing))


def _hang_candidate(
    context: CheckContext, hang: _Hang, after: list[_Hang], last: dict[int, _Last]
) -> Candidate:
    def evidence() -> dict[str, Any]:
        return {
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
            ][:_MOST_LISTED],
            "missing": ranks_text(hang.missing),
            "last": [_last_words(r, each) for r, each in sorted(last.items())][:_MOST_LISTED],
        }

    issue = hang.issue
    members, times = _when(context, hang, after, last)
    heard = [
        f"rank {r} was last in {last[r].call.path or '(root)'}" for r in hang.missing if r in last
    ]
    return candidate_at(
        hang.step_view,
        issue.call,
        Kind.HANG,
        issue.slot,
        hang.missing,
        members,
        times,
        f"{ranks_named(hang.waiting)} wait{'s' if len(hang.waiting) == 1 else ''} for "
        f"{ranks_named(hang.missing)}, who never came to this {issue.op} of "
        f"{ranks_named(sorted(issue.members))}{'; ' if heard else ''}{', '.join(heard[:4])}",
        evidence=evidence,
        priority=-4,
    )


def _when(
    context: CheckContext, hang: _Hang, after: list[_Hang], last: dict[int, _Last]
) -> tuple[Array, Array]:
    """Return who is part of a hang, and since when.

    Who waits does since it came. Who is missing is after all it did, so what went wrong there
    before is the cause; but before what it waits in itself where that is because of this hang.
    """
    issue = hang.issue
    there = np.array([r for r in hang.waiting if r in issue.ranks] or hang.waiting, np.int64)
    away = [rank for rank in hang.missing if rank in last]
    late = {rank: h.issue.call for h in after for rank in h.waiting}
    left = [
        int(context.clock.of_call(late[rank], np.array([rank]))[0]) - 1
        if rank in late
        else last[rank].time_ns + 2
        for rank in away
    ]
    times = np.concatenate([context.clock.of_call(issue.call, there), np.array(left, np.int64)])
    return np.concatenate([there, np.array(away, np.int64)]), times


def _last_words(rank: int, each: _Last) -> dict[str, Any]:
    return {
        "rank": rank,
        "path": each.call.path,
        "phase": each.call.phase.word,
        "open": list(each.stack),
    }


def _first_missed(
    group: list[IssuedCollective], stands: IssuedCollective, waiting: list[int]
) -> tuple[IssuedCollective | None, list[int]]:
    """Return the first collective that members did not come to, and those members. A rank that
    skipped one may stand in the next as if it were this one: sites tell."""
    lines: dict[int, list[IssuedCollective]] = {rank: [] for rank in stands.members}
    for issue in sorted(group, key=lambda i: i.sequence):
        for rank in issue.ranks.tolist():
            lines.setdefault(rank, []).append(issue)
    own = lines[waiting[0]] if waiting else lines[int(stands.ranks[0])]
    for place, issue in enumerate(own):
        absent = [
            rank
            for rank in stands.members
            if len(lines[rank]) <= place or not _is_same_site(lines[rank][place], issue)
        ]
        if absent and len(absent) < len(stands.members):
            return issue, sorted(absent)
    return None, []


def _is_same_site(one: IssuedCollective, other: IssuedCollective) -> bool:
    return one.call is other.call or one.site == other.site


# ---- crashes -------------------------------------------------------------------------------------


def _crashes(
    trace: Trace,
    context: CheckContext,
    last: dict[int, _Last],
    ends: dict[int, str],
    *,
    is_explained: bool,
) -> Iterator[Candidate]:
    """Yield a candidate for every place where ranks raised, or were killed while others went on."""
    # One crash ends a whole job: peers raise because it is gone ("connection closed"), and the
    # launcher kills the rest. Only ranks that no other rank ended may be named. What is asked comes
    # in the order of trust: (1) exceptions that do not speak of a lost peer; (2) where those do not
    # say what they were, who stopped before the others did, by the calls that others went on with;
    # (3) killed ranks, where (1) and (2) name nobody that raised and some rank was not killed: were
    # all gone, the whole job was ended from outside. Where a hang was found (`is_explained`), the
    # ranks that were killed or lost a peer ended because of it, and are not named.
    incarnations = {rank["rank"]: rank["incarnation"] for rank in trace.completeness["ranks"]}
    errors = {c.rank: _end_of(c) for c in crashes(trace) if c.incarnation == incarnations[c.rank]}
    raised = {rank for rank, end in ends.items() if end == EndReason.RAISED.value}
    ranks_of: dict[_End, list[int]] = {}
    for rank in sorted(raised):
        ranks_of.setdefault(errors.get(rank, _UNKNOWN), []).append(rank)
    own = {end: ranks for end, ranks in ranks_of.items() if not end.is_consequence}
    lost = [rank for rank, end in ends.items() if end == EndReason.LOST.value]
    if not (own or lost or is_explained):
        own = ranks_of
    if own.keys() == {_UNKNOWN}:
        # None of them says why: those that others left behind went first. Where that leaves out the
        # ranks that raised, the killed ones are named below, and not they.
        first = _stopped_first([*own[_UNKNOWN], *lost], last, context)
        alone = [rank for rank in first if rank in raised]
        if first:
            own = {_UNKNOWN: alone} if alone else {}
            lost = [rank for rank in first if rank in lost]
        elif at := [r for r in lost if r in last and _is_beside(r, own[_UNKNOWN], last)]:
            doubt = f"{_NAMELESS}; {ranks_named(at)}, last in the same place, may have gone first"
            own = {replace(_UNKNOWN, text=doubt): own[_UNKNOWN]}
    for end, ranks in own.items():
        yield from _crash(ranks, end, last, ends, context)
    if lost and not own and not is_explained and len(lost) < len(ends):
        call = last[lost[0]].call if lost[0] in last else None
        text = "gone without an exception: killed by a signal, aborted, or left by os._exit"
        gone = replace(_UNKNOWN, path=call.path if call else "", text=text)
        yield from _crash(lost, gone, last, ends, context, call)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """What is told of the exception that ended a rank."""

    path: str
    """Of the innermost call it left, "" outside of all."""
    phase: Phase | None
    """Of that call."""
    text: str
    is_consequence: bool = False
    """It says that a peer is gone."""


_UNKNOWN: Final = _End(path="", phase=None, text=_NAMELESS)


def _end_of(crash: Crash) -> _End:
    return _End(
        path=crash.path or "",
        phase=crash.phase,
        text=crash.sentence,
        is_consequence=any(_PEER_LOST.search(text) for text in (crash.error, *crash.causes)),
    )


def _is_beside(rank: int, others: list[int], last: dict[int, _Last]) -> bool:
    return any(last[other].call is last[rank].call for other in others if other in last)


def _stopped_first(ranks: list[int], last: dict[int, _Last], context: CheckContext) -> list[int]:
    """Return the ranks that others left behind and that left nobody behind: they ended first."""

    def is_past(one: int, other: int) -> bool:
        call = last[other].call
        if one not in call.ranks:
            return False
        return bool(context.clock.of_call(call, np.array([one]))[0] < last[one].time_ns)

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
    last: dict[int, _Last],
    ends: dict[int, str],
    context: CheckContext,
    call: CallView | None = None,
) -> Iterator[Candidate]:
    """Yield the candidate of ranks that ended in the same way, in `call` where that is known."""
    known = [rank for rank in ranks if rank in last]
    if not known:
        return
    each = last[known[0]]
    members = np.array(known, np.int64)
    candidate = candidate_at(
        each.step_view,
        call or _call_left(each, known[0], end, context),
        Kind.CRASH,
        "",
        ranks,
        members,
        np.array([last[rank].time_ns for rank in known], np.int64) + 1,
        f"{ranks_named(ranks)}: {end.text}",
        evidence=lambda: {
            "last": [_last_words(rank, last[rank]) for rank in known][:_MOST_LISTED],
            "ends": {str(rank): end for rank, end in sorted(ends.items())[:_MOST_LISTED]},
        },
    )
    candidate.path = end.path
    yield candidate


def _call_left(each: _Last, rank: int, end: _End, context: CheckContext) -> CallView:
    """Return the call that an exception left; outside of all, the last that was no collective.

    A collective has the path of the module that issued it, and is no place to look for a crash of
    that module.
    """
    own = [call for call in each.step_view.calls if rank in call.ranks]
    left = [call for call in own if call.path == end.path and call.phase is end.phase]
    if left:
        return left[-1]
    calls = [call for call in own if call.phase is not Phase.COLLECTIVE]
    at = np.array([rank])
    return max(calls, key=lambda c: int(context.clock.of_call(c, at)[0]), default=each.call)
