"""Ranks that wait for others, and ranks that never came: the missing ranks are at fault.

A record shows the collective in which a rank stands, and which members of its group did not issue
it. The reductions of DDP leave no record: a rank whose last record is of its model's backward waits
there, for the ranks that went through fewer backward passes. Where ranks wait for each other with
messages, the missing ranks are those that did something else than in the step before.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from rankscope.diagnosis.evidence.lastcalls import (
    MOST_LISTED,
    ORDERLY,
    LastCall,
    RaisedEnd,
    last_words,
)
from rankscope.diagnosis.evidence.reducedpasses import PassCount, is_ddp
from rankscope.diagnosis.evidence.stepview import Array, CallView, StepView, grouped
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, ranks_named, ranks_text

_FEWEST_S: Final = 3.0
_TIMES_LONGEST: Final = 3.0
_MOST_TOLD: Final = 4
_MOST_LISTED_LINES: Final = 8
_UNTRACED: Final = (
    "Compare the lines: ranks that left the common way stand at another one. Trace the step in "
    "which it hangs (--rs-steps last:2) to see which collective each rank is in."
)


class _Waits(enum.IntEnum):
    """What ranks wait in. Of two hangs whose ranks wait for each other, the lower comes first."""

    PASS = 0
    MESSAGE = 1
    COLLECTIVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hang:
    """Ranks that stand in a collective, a message or a backward, and those that did not come."""

    step_view: StepView
    kind: _Waits
    call: CallView
    """Where they stand; of a collective: the first of its group that the missing did not come to.
    """
    slot: str
    awaited: str
    """What the missing did not come to, in words."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    since_ns: Mapping[int, int] = field(default_factory=dict)
    """{missing rank: when it did something else instead}, where a record shows it."""


def hangs_of(
    step_views: Sequence[StepView],
    last: dict[int, LastCall],
    ends: dict[int, str],
    stalls: list[dict[str, Any]],
    passes: Mapping[str, Mapping[int, PassCount]],
    in_backward: Mapping[int, bool],
    errors: Mapping[int, RaisedEnd],
) -> Iterator[Candidate]:
    """Yield the hangs in the last steps; `last` is what each rank did, `ends` how streams end,
    `passes` what they did with models that DDP wraps, `in_backward` as of `standing_in_backward`,
    `errors` what they raised."""
    left_open = ranks_left_open(step_views, last, ends)
    standing = {
        rank: call
        for rank, call in sorted(last.items())
        if ends.get(rank) not in ORDERLY and rank not in left_open
    }
    hangs = [*_in_collectives(step_views, last, standing)]
    hangs += _in_passes(last, ends, passes, in_backward)
    hangs += _in_messages(step_views, standing, hangs)
    hangs += _without_record(step_views, last, errors, hangs)
    for hang in hangs:
        later = [h for h in hangs if h is not hang and _is_because_of(h, hang, step_views)]
        yield _hang_candidate(hang, later, last, stalls)


def _in_collectives(
    step_views: Sequence[StepView], last: dict[int, LastCall], standing: Mapping[int, LastCall]
) -> Iterator[_Hang]:
    for step_view in step_views:
        issues = [*known_collectives(step_view)]
        judged: set[tuple[str, int]] = set()
        for call in standing.values():
            stands = call.waiting
            if call.step_view is not step_view or stands is None or stands.is_message:
                continue
            key = (stands.group, stands.sequence)
            if key in judged:
                continue
            judged.add(key)
            group = [issue for issue in issues if issue.group == stands.group]
            came = {r for i in group if i.sequence == stands.sequence for r in i.ranks.tolist()}
            waiting = sorted(r for r in came if r in last and last[r].waiting is not None)
            calls = [(r, c) for r, c in last.items() if c.waiting and c.step_view is not step_view]
            elsewhere = {r for r, c in calls if c.waiting and c.waiting.group == stands.group}
            missed, missing, since_ns = _first_missed(group, stands, waiting, elsewhere)
            if missed is not None:
                stay = tuple(rank for rank in waiting if rank not in missing) or tuple(waiting)
                yield _Hang(
                    step_view=step_view,
                    kind=_Waits.COLLECTIVE,
                    call=missed.call,
                    slot=missed.slot,
                    awaited=f"this {missed.op} of {ranks_named(sorted(missed.members))}",
                    waiting=stay,
                    missing=tuple(missing),
                    since_ns=since_ns,
                )


def _in_passes(
    last: Mapping[int, LastCall],
    ends: Mapping[int, str],
    passes: Mapping[str, Mapping[int, PassCount]],
    in_backward: Mapping[int, bool],
) -> Iterator[_Hang]:
    """Yield a hang for every wrapped model in whose backward ranks stand, and others came less
    often."""
    for path, by_rank in passes.items():
        calls = {rank: _backward_of(last[rank].call, path) for rank in in_backward}
        counts = {r: by_rank[r].reduced for r, call in calls.items() if call and r in by_rank}
        most = max(counts.values(), default=0)
        waiting = [rank for rank, count in counts.items() if count == most]
        missing = [rank for rank, count in by_rank.items() if count.reduced < most]
        call = calls[waiting[0]] if waiting else None
        are_sure = any(map(in_backward.get, waiting)) or all(
            ends.get(rank) in ORDERLY
            or by_rank[rank].left_out
            or (rank in last and last[rank].waiting)
            for rank in missing
        )
        if call is None or not missing or not are_sure:
            continue
        left_out = {rank: count.left_out for rank, count in by_rank.items() if count.left_out}
        left_out = left_out if left_out.keys() <= set(missing) else {}
        went = grouped((by_rank[rank].reduced, rank) for rank in missing)
        texts = [f"{ranks_named(ranks)} went through {number}" for number, ranks in went.items()]
        texts += [f"a forward of {ranks_named([rank])} in step {entry.step} has no backward"
                  for rank, entry in left_out.items()]  # fmt: skip
        yield _Hang(
            step_view=last[waiting[0]].step_view,
            kind=_Waits.PASS,
            call=call,
            slot="",
            awaited=f"the reduction of DDP in backward pass {most} of the traced steps "
            f"({', '.join(texts[:_MOST_TOLD])})",
            waiting=tuple(waiting),
            missing=tuple(sorted(missing)),
            since_ns={rank: entry.time_ns for rank, entry in left_out.items()},
        )


def _backward_of(call: CallView, path: str) -> CallView | None:
    """Return the backward of a wrapped model that a call is, or is part of."""
    calls = (call, *call.around) if call.phase is Phase.BACKWARD else ()
    return next((outer for outer in calls if outer.path == path and is_ddp(outer)), None)


def standing_in_backward(
    last: Mapping[int, LastCall],
    ends: Mapping[int, str],
    errors: Mapping[int, RaisedEnd],
    step_views: Sequence[StepView],
    at_s: float | None,
) -> dict[int, bool]:
    """Return {rank whose last record is of a backward: whether it surely waits there}: it raised
    a timeout, or has been there for long `at_s` (None: it is not known when)."""
    backwards = [c for step_view in step_views for c in step_view.of(Phase.BACKWARD)]
    patience_s = _patience_s(call.span(call.ranks) for call in backwards)
    standing: dict[int, bool] = {}
    for rank, call in last.items():
        if call.call.phase is not Phase.BACKWARD or call.waiting or ends.get(rank) in ORDERLY:
            continue
        if ends.get(rank) == EndReason.RAISED.value:
            if rank in errors and errors[rank].is_consequence:
                standing[rank] = errors[rank].is_timeout
        elif at_s is None or at_s - call.time_ns / 1e9 >= patience_s:
            standing[rank] = at_s is not None
    return standing


def _patience_s(spans: Iterable[tuple[Array, Array]]) -> float:
    """Return how long a rank may stay in one of them before it counts as standing; `spans`: begins
    and ends of calls, in nanoseconds."""
    longest_ns = max((int((stops - begins).max()) for begins, stops in spans), default=0)
    return max(_FEWEST_S, _TIMES_LONGEST * longest_ns / 1e9)


def _in_messages(
    step_views: Sequence[StepView], standing: Mapping[int, LastCall], hangs: Sequence[_Hang]
) -> Iterator[_Hang]:
    """Yield a hang for every set of ranks for whom others wait in a send or a recv."""
    waits = {rank: set(hang.missing) for hang in hangs for rank in hang.waiting}
    peers = {
        rank: int(call.waiting.facts["peer"])
        for rank, call in standing.items()
        if call.waiting is not None and call.waiting.is_message and not call.waiting.lacks
    }
    waits |= {rank: {peer} for rank, peer in peers.items() if peer >= 0}
    ranks_by_missing: dict[tuple[int, ...], list[int]] = {}
    for rank in peers:
        reached, ahead = {rank}, [rank]
        while ahead:
            ahead = [r for at in ahead for r in waits.get(at, ()) if r not in reached]
            reached.update(ahead)
        missing = sorted(r for r in reached if not waits.get(r))
        circle = sorted(reached)
        missing = missing or [r for r in circle if _is_unlike_before(step_views, r)] or circle
        if rank not in missing or missing == circle:
            ranks_by_missing.setdefault(tuple(missing), []).append(rank)
    for missing_ranks, waiting in ranks_by_missing.items():
        first = next((r for r in waiting if peers[r] in missing_ranks), None)
        stands = None if first is None else standing[first].waiting
        if first is None or stands is None:
            continue
        yield _Hang(
            step_view=standing[first].step_view,
            kind=_Waits.MESSAGE,
            call=stands.call,
            slot=stands.slot,
            awaited=f"the other end of this {stands.op} of rank {first}",
            waiting=tuple(waiting),
            missing=missing_ranks,
        )


def _without_record(
    step_views: Sequence[StepView],
    last: Mapping[int, LastCall],
    errors: Mapping[int, RaisedEnd],
    hangs: Sequence[_Hang],
) -> Iterator[_Hang]:
    """Yield a hang where the missing raised a timeout in what no record tells of (DDP sends buffers
    round in C++), and who waits for them did something else than in the step before."""
    for hang in hangs:
        stood = [r for r in hang.missing if r in last and r in errors and errors[r].is_timeout]
        unlike = tuple(rank for rank in hang.waiting if _is_unlike_before(step_views, rank))
        are_outside = all(not last[r].waiting for r in stood) and len(stood) == len(hang.missing)
        is_told = any(set(hang.missing) <= set(h.waiting) for h in hangs)
        if not unlike or not are_outside or is_told:
            continue
        if any(_is_unlike_before(step_views, rank) for rank in hang.missing):
            continue
        yield _Hang(
            step_view=last[stood[0]].step_view,
            kind=_Waits.PASS,
            call=last[stood[0]].call.top,
            slot="",
            awaited="what no record tells of, at "
            f"{' and '.join(dict.fromkeys(errors[rank].where for rank in stood))}",
            waiting=hang.missing,
            missing=unlike,
        )


def _is_unlike_before(step_views: Sequence[StepView], rank: int) -> bool:
    """True where a rank issued something else in its last steps than in the step before."""
    at, lines = np.array([rank]), []
    for step_view in step_views:
        if step_view.is_setup:
            continue
        issues = [issue for issue in issues_of(step_view) if rank in issue.ranks]
        issues.sort(key=lambda issue: int(issue.call.times(at)[0]))
        if issues or any(rank in call.ranks for call in step_view.calls):
            lines.append([(i.op, i.group, i.facts.get("peer")) for i in issues])
    pairs = list(itertools.pairwise(lines))
    return any(
        after != (before[: len(after)] if number == len(pairs) else before)
        for number, (before, after) in enumerate(pairs, 1)
    )


def ranks_left_open(
    step_views: Sequence[StepView], last: Mapping[int, LastCall], ends: Mapping[int, str]
) -> set[int]:
    """Return the ranks in a collective whose missing members are unknown: some fact is missing."""
    doubtful = set().union(*map(ranks_in_doubt, step_views))
    return {
        rank
        for rank, call in last.items()
        if (stands := call.waiting) is not None
        and not (stands.is_message or ends.get(rank) in ORDERLY)
        and (stands.lacks or not doubtful.isdisjoint(stands.members))
    }


def _is_because_of(later: _Hang, hang: _Hang, step_views: Sequence[StepView]) -> bool:
    """True where those who are missing in `later` wait in `hang`, and would come to it first."""
    if not set(later.missing) <= set(hang.waiting):
        return False
    if later.kind is not hang.kind:
        if not set(hang.missing) <= set(later.waiting):
            return True
        # they wait for each other: those are missing that did something else than before
        is_unlike, is_other_unlike = (
            any(_is_unlike_before(step_views, rank) for rank in h.missing) for h in (hang, later)
        )
        return hang.kind < later.kind if is_unlike == is_other_unlike else is_unlike
    first, second = hang.call, later.call
    for step_view in reversed(step_views):
        a, b = _same_call(step_view, first), _same_call(step_view, second)
        if a is not None and b is not None:
            common = np.intersect1d(a.ranks, b.ranks)[:1]
            if len(common):
                return bool(a.times(common) < b.times(common))
    calls = hang.step_view.calls
    return first in calls and second in calls and calls.index(first) < calls.index(second)


def _same_call(step_view: StepView, call: CallView) -> CallView | None:
    key = (call.phase, call.ordinal, call.micro_batch)
    named = step_view.named(call.path)
    return next((c for c in named if (c.phase, c.ordinal, c.micro_batch) == key), None)


def _hang_candidate(
    hang: _Hang, later: list[_Hang], last: dict[int, LastCall], stalls: list[dict[str, Any]]
) -> Candidate:
    calls = sorted(last.items())
    members, times = _when(hang, later, last)
    places = [f"rank {r} was last in {last[r].call.path or '(root)'}"
              for r in hang.missing if r in last]  # fmt: skip
    waiting = [(rank, call.waiting) for rank, call in calls if call.waiting is not None]
    return candidate_at(
        hang.step_view,
        hang.call,
        Kind.HANG,
        hang.slot,
        hang.missing,
        f"{ranks_named(hang.waiting)} wait{'s' if len(hang.waiting) == 1 else ''} for "
        f"{ranks_named(hang.missing)}, who never came to {hang.awaited}"
        f"{'; ' if places else ''}{', '.join(places[:4])}",
        evidence=lambda: {
            "waiting": [
                {"rank": r, "path": i.call.path, "collective": i.slot, "op": i.op, "group": i.group}
                for r, i in waiting[:MOST_LISTED]
            ],
            "missing": ranks_text(hang.missing),
            "last": [last_words(rank, call) for rank, call in calls[:MOST_LISTED]],
            **({"stalls": stalls} if stalls else {}),
        },
        members=members,
        times_ns=times,
        priority=-4,
    )


def _when(hang: _Hang, later: list[_Hang], last: dict[int, LastCall]) -> tuple[Array, Array]:
    """Return who is part of a hang, and since when. Who waits: since it came. Who is missing: after
    all it did, whose faults are the cause, but before what it waits in itself because of this hang.
    """
    present = np.array([r for r in hang.waiting if r in hang.call.ranks] or hang.waiting, np.int64)
    begun = hang.call.times(present)
    if hang.kind is _Waits.PASS:
        begun = np.array([last[rank].time_ns + 1 for rank in present.tolist()], np.int64)
    absent = [rank for rank in hang.missing if rank in last and rank not in present]
    if hang.kind is _Waits.PASS and hang.since_ns.keys() >= set(absent):
        begun, present = begun[:0], present[:0]  # what went apart since then comes of it as well
    late = {rank: h.call for h in later for rank in h.waiting}
    since = [
        hang.since_ns[rank]
        if rank in hang.since_ns
        else int(late[rank].times(np.array([rank]))[0]) - 1
        if rank in late
        else last[rank].time_ns + 2
        for rank in absent
    ]
    times = np.concatenate([begun, np.array(since, np.int64)])
    return np.concatenate([present, np.array(absent, np.int64)]), times


def _first_missed(
    group: list[IssuedCollective], stands: IssuedCollective, waiting: list[int], elsewhere: set[int]
) -> tuple[IssuedCollective | None, list[int], dict[int, int]]:
    """Return the first collective that members did not come to, those, and when each of them issued
    another one instead. A rank that skipped one may stand in the next as if it were this one: sites
    tell. Ranks `elsewhere` wait too."""
    lines: dict[int, list[IssuedCollective]] = {rank: [] for rank in stands.members}
    lines |= issued_by_rank(group)
    for place, issue in enumerate(lines[waiting[0] if waiting else int(stands.ranks[0])]):
        at_place = {rank: line[place] for rank, line in lines.items() if len(line) > place}
        came = {r for r, i in at_place.items() if i.call is issue.call or i.site == issue.site}
        absent = [rank for rank in stands.members if rank not in elsewhere | came]
        if 0 < len(absent) < len(stands.members):
            others = {rank: at_place[rank].call for rank in absent if rank in at_place}
            since_ns = {r: int(c.times(np.array([r]))[0]) - 1 for r, c in others.items()}
            return issue, sorted(absent), since_ns
    return None, [], {}


# ---- in a step that is not traced ----------------------------------------------------------------


def untraced_hang(
    last: Mapping[int, LastCall],
    ends: Mapping[int, str],
    errors: Mapping[int, RaisedEnd],
    passes: Mapping[str, Mapping[int, PassCount]],
) -> Iterator[Candidate]:
    """Yield a hang where all ranks that failed raised that their peers did not come, or had left
    them in order, and no traced step shows in what they waited."""
    failed = [rank for rank, end in ends.items() if end not in ORDERLY]
    left = [rank for rank, end in ends.items() if end in ORDERLY and rank in last]
    raised = {rank: errors[rank] for rank in failed if rank in errors and rank in last}
    are_consequences = bool(raised) and all(end.is_consequence for end in raised.values())
    if not are_consequences or len(raised) < len(failed):
        return
    if not left and not any(end.is_timeout for end in raised.values()):
        return
    missing, more = left, "ended in order"
    for by_rank in passes.values() if not left else ():
        most = max(count.reduced for count in by_rank.values())
        left_out = [r for r, n in by_rank.items() if n.left_out]
        missing = missing or [rank for rank, n in by_rank.items() if n.reduced < most]
        missing = missing or (left_out if len(left_out) < len(by_rank) else [])
        more = "took part in fewer backward passes, or ran a forward without one"
    lines = grouped((end.where or "a line that is not known", r) for r, end in raised.items())
    texts = [f"{ranks_named(ranks)} at {where}" for where, ranks in lines.items()]
    first = last[min(raised)]
    named = f"; {ranks_named(sorted(missing))} {more}" if missing else ""
    yield candidate_at(
        first.step_view,
        first.call.top,
        Kind.HANG,
        "",
        missing or sorted(raised),
        "the ranks wait for each other, or for one that is late, in what is not traced: those that "
        f"failed raised only that a peer did not come, {', '.join(texts[:_MOST_LISTED_LINES])}"
        f"{named}",
        evidence=lambda: {
            "last": [last_words(rank, last[rank]) for rank in sorted(raised)[:MOST_LISTED]],
            "raised": [{"rank": rank, "where": end.where, "error": end.text}
                       for rank, end in sorted(raised.items())[:MOST_LISTED]],
            "ends": {str(rank): end for rank, end in sorted(ends.items())[:MOST_LISTED]},
        },
        members=np.array(sorted(raised), np.int64),
        times_ns=np.array([last[rank].time_ns for rank in sorted(raised)], np.int64) + 1,
        path="",
        advice=_UNTRACED,
    )  # fmt: skip


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
    patience_s = _patience_s(issue.call.span(issue.ranks) for issue in issues)
    now_s = read_s if at_s is None else at_s
    stays_s = {rank: now_s - call.time_ns / 1e9 for rank, call in last.items() if call.waiting}
    recent = {rank for rank, stay_s in stays_s.items() if stay_s < patience_s}
    calls = ((rank, last[rank].waiting) for rank in sorted(recent))
    ranks_by_place = grouped(
        ((i.op, i.call.path or "(root)"), rank) for rank, i in calls if i is not None
    )
    for (op, path), ranks in [*ranks_by_place.items()][:_MOST_TOLD] if at_s is None else ():
        waited_s = max(stays_s[rank] for rank in ranks)
        if waited_s >= patience_s / _TIMES_LONGEST:
            context.coverage.notes.append(
                f"{ranks_named(ranks)} {'has' if len(ranks) == 1 else 'have'} been in {op} of "
                f"{path} for {waited_s:.1f} s; in this job that is a "
                f"hang after {patience_s:.1f} s: ask again"
            )
    return {rank: call for rank, call in last.items() if rank not in recent}
