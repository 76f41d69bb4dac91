"""How a job ended: the hangs and crashes that its last steps show, and which of them came first."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, CheckContext, candidate_at
from rankscope.diagnosis.evidence.lastcalls import (
    MOST_LISTED,
    LastCall,
    RaisedEnd,
    ends_of,
    errors_of,
    last_calls,
    last_words,
)
from rankscope.diagnosis.evidence.reducedpasses import ReducedPasses
from rankscope.diagnosis.evidence.stepview import CallView, StepView, grouped
from rankscope.diagnosis.rules.hangs import (
    hangs_of,
    ranks_left_open,
    standing_in_backward,
    untraced_hang,
    without_recent,
)
from rankscope.errors import TraceError
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, ranks_named
from rankscope.tree.views import Trace

CONNECTION_ENDED: Final = re.compile(
    r"connection (closed|reset)|broken pipe|closed by peer|remote process (exited|has)",
    re.IGNORECASE,
)
"""What an exception says where the peer's process has ended, and did not only fail to come."""


# ---- ends ----------------------------------------------------------------------------------------


MOST_STALLS: Final = 16
_NAMELESS: Final = "an exception outside of any module's call"


def ended_badly(
    trace: Trace, context: CheckContext, step_views: Sequence[StepView], passes: ReducedPasses
) -> Iterator[Candidate]:
    """Yield the hangs and crashes that the last steps of the last incarnation show, and the passes
    of all its steps.

    Raises:
        TraceError: the header's time of the end cannot be read.
    """
    ends, errors = ends_of(trace), errors_of(trace)
    last = last_calls(step_views)
    ended, now_s = trace.run.get("ended"), None
    if trace.is_live or ended is not None:
        at = (ended or {}).get("at")
        try:
            at_s = None if at is None else datetime.fromisoformat(str(at)).timestamp()
        except ValueError as error:
            text = f"{trace.path}: ended at {str(at)[:60]!r}: the trace is damaged"
            raise TraceError(text) from error
        now_s = trace.read_s if at_s is None else at_s
        last = without_recent(last, step_views, context, trace.read_s, at_s)
    unrecorded: dict[int, str] = {}
    last_lives = {entry["rank"]: entry.get("full_from") for entry in trace.completeness["ranks"]}
    for rank, full_from in last_lives.items():
        if full_from is not None:
            step_view = last[rank].step_view if rank in last else None
            # steps that were written already make room in the spool again: later ones are recorded
            is_behind = step_view is not None and step_view.mode.word == full_from["mode"]
            if step_view is None or not (is_behind and step_view.step > int(full_from["step"])):
                unrecorded[rank] = f"{full_from['mode']} step {full_from['step']}"
    # what others wait for may be what a full spool had no room for
    may_be_left = ended is None and not trace.stalls
    is_any_lost = EndReason.LOST.value in ends.values()
    # killed before any rank failed: the launcher ended the others
    noted = {int(e["rank"]): str(e["by"]) for e in trace.run.get("killed", ())}
    killed = {r: by for r, by in noted.items() if ends.get(r) == EndReason.LOST.value}
    killed = killed if may_be_left else {}
    # nobody stands any more where a rank is lost, and all that waited raised
    waiting = [(rank, call.waiting.call.node) for rank, call in last.items() if call.waiting]
    have_raised = (
        is_any_lost
        and bool(waiting)
        and all(
            any(rank in o.ranks and CONNECTION_ENDED.search(o.error) for o in node.outcomes)
            for rank, node in waiting
        )
    )
    by_model = dict(passes.of(max((s.incarnation for s in step_views), default=0)))
    hangs: list[Candidate] = []
    if not unrecorded and not (may_be_left and (killed or have_raised)):
        # a stall is no verdict (a first step may compile for ten minutes), but it says since when
        now_ns = time.time_ns() if trace.is_live else None
        latest = {stall.host: stall for stall in trace.stalls}
        stalls = [stall.as_evidence(now_ns) for _, stall in sorted(latest.items())][:MOST_STALLS]
        in_backward = standing_in_backward(last, ends, errors, step_views, now_s)
        hangs = list(hangs_of(step_views, last, ends, stalls, by_model, in_backward, errors))
    is_open = not killed and bool(ranks_left_open(step_views, last, ends))
    if not hangs and not is_open and not unrecorded and ended is None and not trace.is_live:
        hangs = list(untraced_hang(last, ends, errors, by_model))
    yield from hangs
    if ended is None:  # else no rank failed: the job was ended from outside
        is_explained = bool(hangs) or is_open
        yield from _crashes(ends, errors, last, unrecorded, killed, is_explained=is_explained)


# ---- crashes -------------------------------------------------------------------------------------


def _crashes(
    ends: dict[int, str],
    errors: Mapping[int, RaisedEnd],
    last: dict[int, LastCall],
    unrecorded: dict[int, str],
    killed: Mapping[int, str],
    *,
    is_explained: bool,
) -> Iterator[Candidate]:
    """Yield ranks that raised, or were killed while others went on; `is_explained` by a hang."""
    # One crash ends a whole job: peers raise because it is gone ("connection closed"), and the
    # launcher kills the rest. Only ranks that no other rank ended may be named. What is asked comes
    # in the order of trust: (1) exceptions that name no lost peer; (2) where those do not
    # say what they were, who stopped before the others did, by the calls that others went on with;
    # (3) killed ranks, where (1) and (2) name nobody that raised and some rank was not killed: were
    # all gone, the whole job was ended from outside. Where a hang was found (`is_explained`), the
    # ranks that were killed or lost a peer ended because of it, and are not named.
    in_order = {rank: call for rank, call in last.items() if rank not in unrecorded}
    raised = {rank for rank, end in ends.items() if end == EndReason.RAISED.value}
    ranks_of = grouped((errors.get(rank, _UNKNOWN), rank) for rank in sorted(raised))
    ranks_by_end = {end: ranks for end, ranks in ranks_of.items() if not end.is_consequence}
    lost = [rank for rank, end in ends.items() if end == EndReason.LOST.value]
    if killed and ranks_by_end.keys() <= {_UNKNOWN}:
        ranks_by_end, lost = {}, [*killed]
    if not (ranks_by_end or lost or is_explained):
        ranks_by_end = ranks_of
    if ranks_by_end.keys() == {_UNKNOWN}:
        # None of them says why: those that others left behind went first. Where that leaves out the
        # ranks that raised, the killed ones are named below, and not they.
        first = _stopped_first([*ranks_by_end[_UNKNOWN], *lost], in_order)
        alone = [rank for rank in first if rank in raised]
        last_places = [in_order[rank].call for rank in ranks_by_end[_UNKNOWN] if rank in in_order]
        if first:
            ranks_by_end = {_UNKNOWN: alone} if alone else {}
            lost = [rank for rank in first if rank in lost]
        elif at := [r for r in lost if r in in_order and in_order[r].call in last_places]:
            doubt = f"{_NAMELESS}; {ranks_named(at)}, last in the same place, may have gone first"
            ranks_by_end = {replace(_UNKNOWN, text=doubt): ranks_by_end[_UNKNOWN]}
    for end, ranks in ranks_by_end.items():
        yield from _crash(ranks, end, last, ends)
    if lost and not ranks_by_end and not is_explained and len(lost) < len(ends):
        call = last[lost[0]].call if lost[0] in last else None
        signals = sorted(set(killed.values()))
        text = "gone without an exception: killed by a signal, aborted, or left by os._exit"
        text = (
            f"killed by {' and '.join(signals)}, before any other rank failed" if signals else text
        )
        if lost[0] in unrecorded:
            text += f"; its spool was full, nothing is recorded of it from {unrecorded[lost[0]]} on"
        gone = replace(_UNKNOWN, path=call.path if call else "", text=text)
        yield from _crash(lost, gone, last, ends, call)


_UNKNOWN: Final = RaisedEnd(path="", phase=None, text=_NAMELESS)


def _stopped_first(ranks: list[int], last: dict[int, LastCall]) -> list[int]:
    """Return the ranks that others left behind and that left nobody behind: they ended first."""

    def is_past(rank: int, stopped: int) -> bool:
        call = last[stopped].call
        is_in_call = rank in call.ranks
        return is_in_call and bool(call.times(np.array([rank]))[0] < last[rank].time_ns)

    return [
        rank
        for rank in ranks
        if rank in last and last[rank].waiting is None
        if any(is_past(peer, rank) for peer in last)
        and not any(is_past(rank, peer) for peer in last)
    ]


def _crash(
    ranks: list[int],
    end: RaisedEnd,
    last: dict[int, LastCall],
    ends: dict[int, str],
    call: CallView | None = None,
) -> Iterator[Candidate]:
    recorded = [rank for rank in ranks if rank in last]
    if not recorded:
        return
    first = last[recorded[0]]
    calls = [inner for inner in first.step_view.calls if recorded[0] in inner.ranks]
    exited = [inner for inner in calls if inner.path == end.path and inner.phase is end.phase]
    if call is None and exited:
        call = exited[-1]
    elif call is None:
        # an exception outside of all calls follows the last one that was no collective: that has
        # the path of a module, and is no place to look for its crash
        at = np.array([recorded[0]])
        modules = [inner for inner in calls if inner.phase is not Phase.COLLECTIVE]
        call = max(modules, key=lambda inner: int(inner.times(at)[0]), default=first.call)
    yield candidate_at(
        first.step_view,
        call,
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
