"""How a job ended: ranks that crashed, ranks that wait for others, ranks that never came.

Read from the records alone: what each rank did last, which calls it did not leave, in which
collective it stands, and which members of that collective's group did not issue it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, CheckContext, candidate_at
from rankscope.diagnosis.evidence.lastcalls import (
    CONNECTION_ENDED,
    MOST_LISTED,
    PEER_LOST,
    LastCall,
    last_calls,
    last_words,
)
from rankscope.diagnosis.evidence.stepview import CallView, StepView, grouped
from rankscope.diagnosis.rules.hangs import hangs_of, ranks_left_open, without_recent
from rankscope.errors import TraceError
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, ranks_named
from rankscope.tree.crashes import Crash, crashes
from rankscope.tree.views import Trace

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
