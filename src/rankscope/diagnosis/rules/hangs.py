"""Ranks that stand in a collective for others: which members of its group did not issue it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from rankscope.diagnosis.evidence.lastcalls import MOST_LISTED, ORDERLY, LastCall, last_words
from rankscope.diagnosis.evidence.stepview import Array, CallView, StepView, grouped
from rankscope.record.finding import Kind
from rankscope.record.ranks import ranks_named, ranks_text

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
