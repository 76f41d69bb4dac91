"""What each rank did last: which calls it did not leave, and in which collective it stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, issues_of
from rankscope.diagnosis.evidence.stepview import CallView, StepView
from rankscope.record.call import CallStatus
from rankscope.record.ranks import EndReason

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
