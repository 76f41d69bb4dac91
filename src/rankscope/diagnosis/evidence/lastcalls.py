"""What each rank did last, and how it ended: read from the records alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, issues_of
from rankscope.diagnosis.evidence.stepview import CallView, StepView
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.tree.crashes import crashes
from rankscope.tree.views import Trace

ORDERLY: Final = frozenset({EndReason.EXIT.value, EndReason.CLOSED.value})
"""How a stream ends whose rank ended by itself."""
PEER_LOST: Final = re.compile(
    r"timed? ?out|connection (closed|reset|refused)|broken pipe|closed by peer|Dist\w+Error|"
    r"gloo|NCCL|Watchdog",
    re.IGNORECASE,
)
"""What the exception of a rank says whose peer is gone or did not come: a consequence. These are
words of torch and its backends, which raise the same few classes for everything."""
_TIMED_OUT: Final = re.compile(r"timed? ?out|Watchdog", re.IGNORECASE)
MOST_LISTED: Final = 16
"""Ranks that evidence names one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCall:
    """What a rank did last."""

    step_view: StepView
    call: CallView
    innermost: CallView | None
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
            begins = dict(zip(call.ranks.tolist(), call.times(call.ranks).tolist()))
            for rank, time_ns in begins.items():
                if rank not in latest or time_ns >= latest[rank][0]:
                    latest[rank] = (time_ns, call)
            for outcome in () if call.node.has_returned else call.node.outcomes:
                for rank in outcome.ranks if outcome.status == CallStatus.UNFINISHED.word else ():
                    opened.setdefault(rank, []).append((begins[rank], number, call))
        for rank, (time_ns, call) in latest.items():
            if rank in last and last[rank].time_ns > time_ns:
                continue
            in_order = sorted(opened.get(rank, ()), key=lambda entry: entry[:2])
            stack = [inner for _, _, inner in in_order]
            last[rank] = LastCall(
                step_view=step_view,
                call=call,
                innermost=stack[-1] if stack else None,
                time_ns=time_ns,
                stack=tuple(dict.fromkeys(inner.path for inner in stack)),
                waiting=next((issue for issue in issues if _stands_in(issue, rank)), None),
            )
    return last


def _stands_in(issue: IssuedCollective, rank: int) -> bool:
    """True where a rank did not come back from a collective, or came back without its peers."""
    outcomes = [outcome for outcome in issue.call.node.outcomes if rank in outcome.ranks]
    return rank in issue.ranks and any(
        outcome.status == CallStatus.UNFINISHED.word
        or (outcome.status == CallStatus.RAISED.word and bool(PEER_LOST.search(outcome.error)))
        for outcome in outcomes
    )


def last_words(rank: int, last: LastCall) -> dict[str, Any]:
    """Return the evidence of a finding about one rank."""
    call = last.call
    return {"rank": rank, "path": call.path, "phase": call.phase.word, "open": list(last.stack)}


# ---- how it ended -------------------------------------------------------------------------------


def ends_of(trace: Trace) -> dict[int, str]:
    """Return {rank: how its last stream ends}."""
    return {rank["rank"]: str(rank["end"]) for rank in trace.completeness["ranks"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedEnd:
    """How an exception ended a rank."""

    path: str
    """Of the innermost call it left, "" outside of all."""
    phase: Phase | None
    text: str
    where: str = ""
    """The line of the program that it left."""
    is_consequence: bool = False
    is_timeout: bool = False
    """It says that a peer did not come in time."""


def errors_of(trace: Trace) -> dict[int, RaisedEnd]:
    """Return {rank that an exception ended: how}, of each rank's last life."""
    incarnations = {rank["rank"]: rank["incarnation"] for rank in trace.completeness["ranks"]}
    return {
        c.rank: RaisedEnd(
            path=c.path or "",
            phase=c.phase,
            text=c.sentence,
            where=c.where,
            is_consequence=any(PEER_LOST.search(text) for text in (c.error, *c.causes)),
            is_timeout=any(_TIMED_OUT.search(text) for text in (c.error, *c.causes)),
        )
        for c in crashes(trace)
        if c.incarnation == incarnations[c.rank]
    }
