"""What relays noticed while the job ran: since when no rank of a host moved.

It is no verdict: a first step that compiles for ten minutes stands still too. It says since when,
which records alone cannot, and stands beside a hang that the records show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rankscope.diagnosis.candidates import Candidate
from rankscope.diagnosis.context import CheckContext
from rankscope.record.finding import Kind
from rankscope.run.stalls import Stall, utc_text
from rankscope.tree.views import Trace

__all__ = ["tell_standstills"]

_MOST = 16
"""Notes of standstills in one report."""


def tell_standstills(trace: Trace, scene: CheckContext, suspects: Iterable[Candidate]) -> None:
    """Note every standstill, and give the last one of each host to the hangs as evidence."""
    found = trace.standstills
    if not found:
        return
    now_ns = time.time_ns() if trace.is_live else None
    scene.ledger.notes.extend(each.told(now_ns) for each in found[-_MOST:])
    latest = {each.host: each for each in found}
    told = [_fields(each, now_ns) for _, each in sorted(latest.items())][:_MOST]
    for suspect in suspects:
        if suspect.kind is Kind.HANG:
            suspect.evidence = _with(suspect.evidence, told)


def _with(
    evidence: Callable[[], Mapping[str, Any]], told: list[dict[str, Any]]
) -> Callable[[], Mapping[str, Any]]:
    return lambda: {**evidence(), "standstill": told}


def _fields(each: Stall, now_ns: int | None) -> dict[str, Any]:
    """Return a standstill as evidence: {host, since, until, seconds}; `until` is null while it
    lasts, or where nobody saw its end."""
    until_ns = each.over_ns or None
    seconds = each.seconds(until_ns or now_ns or each.noticed_ns)
    return {
        "host": each.host,
        "since": utc_text(each.since_ns),
        "until": None if until_ns is None else utc_text(until_ns),
        "seconds": seconds,
        "message": each.told(now_ns),
    }
