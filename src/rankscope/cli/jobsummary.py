"""What `rankscope top` says of a job, as JSON data: its screen is made of the same."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from rankscope.record.call import Mode
from rankscope.record.ranklists import ranks_text
from rankscope.record.timetext import utc_text
from rankscope.run.jobstatus import EndedStep, JobStatus, RankStatus, fullest_spool

__all__ = ["SORTS", "job_summary"]

FORMAT: Final = "rankscope.top/1"
_MOST_WORST: Final = 10
_OF_WORST: Final = (
    *("rank", "host", "step_s", "own_s", "beside_all", "beside_history"),
    *("slow_steps", "compared_steps"),
)
"""What is told of each of those, as a `RankStatus` has it."""
_FEWEST_STEPS: Final = 3

Group = dict[str, Any]
SORTS: Final[dict[str, Callable[[Group], Any]]] = {
    "rank": lambda group: (),
    "age": lambda group: -(group["age_s"] or [0.0])[-1],
    "time": lambda group: -(group["step_s"] or [0.0])[-1],
}
"""Orders of groups, by name; groups alike in it stand in order of rank."""


def job_summary(
    folder: Path,
    status: JobStatus,
    statuses: Sequence[RankStatus],
    *,
    state: str,
    sort: str,
) -> dict[str, Any]:
    """Return what is known of a job; fields as in docs/commands/top.md.

    Args:
        folder: the trace folder.
        status: of the job.
        statuses: of its ranks that are to be shown.
        state: "running", "deserted" or "ended".
        sort: one of `SORTS`.
    """
    seen = [status.rank for status in statuses]
    hosts = {status.host for status in statuses if status.host}
    steps = [s.step for s in statuses if s.step is not None and s.mode is Mode.TRAIN]
    taken = [status.step_s for status in statuses if status.step_s is not None]
    totals, written_ns = status.totals, status.written_ns
    return {
        "format": FORMAT,
        "trace": str(folder),
        "at": utc_text(time.time_ns()),
        "run": status.run["id"],
        "state": state,
        "world_size": status.world_size,
        "ranks": ranks_text(seen),
        "hosts": len(hosts),
        "ranks_by_state": dict(sorted(Counter(s.place.state for s in statuses).items())),
        "step": max(steps, default=None),
        "step_s": median(taken) if taken else None,
        "records_per_s": totals.records_per_s,
        "bytes_per_s": totals.bytes_per_s,
        "received_bytes": totals.received_bytes,
        "lost_records": sum(status.lost_records for status in statuses),
        "skipped": False,  # by no version since there is one reader
        "unread_bytes": totals.unread_bytes,
        "status_age_s": max(0.0, (time.time_ns() - written_ns) / 1e9) if written_ns else None,
        "spool": fullest_spool(statuses),
        "groups": sorted(_groups(statuses), key=SORTS[sort]),
        "worst": _worst(statuses),
        "loss": _spread(statuses, lambda step: step.loss),
        "grad_norm": _spread(statuses, lambda step: step.grad_norm),
    }


def _groups(statuses: Sequence[RankStatus]) -> list[Group]:
    """Return the ranks of which the same is to be said, those of the lowest rank first."""
    alike: dict[object, list[RankStatus]] = {}
    for status in statuses:
        said = (status.place, status.is_step_over, status.waits_for, _is_slow(status))
        alike.setdefault(said, []).append(status)
    return [
        {
            "ranks": ranks_text(status.rank for status in group),
            "state": group[0].place.state,
            "step": group[0].place.step,
            "step_over": group[0].is_step_over,
            "where": group[0].place.where,
            "waits_in": group[0].place.waits_in if group[0].place.op else "",
            "waits_for": ranks_text(group[0].waits_for),
            "slow": _is_slow(group[0]),
            "age_s": _range(status.age_s for status in group),
            "step_s": _range(status.step_s for status in group),
            "beside_all": _range(status.beside_all for status in group),
            "beside_history": _range(status.beside_history for status in group),
        }
        for group in alike.values()
    ]


def _is_slow(status: RankStatus) -> bool:
    """True for a rank that was slower than the others in half of its last steps: these are not like
    the others, those that were slow once are."""
    return 2 * status.slow_steps >= status.compared_steps >= _FEWEST_STEPS


def _range(numbers: Any) -> list[float] | None:
    """Return the least and the greatest of those that are known; None where none is."""
    known = [number for number in numbers if number is not None]
    return [min(known), max(known)] if known else None


def _worst(statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
    """Return the ranks that took longest in their last step beside the median, slowest first."""
    compared = [status for status in statuses if status.beside_all is not None]
    compared.sort(key=lambda status: (-(status.beside_all or 0.0), -status.slow_steps))
    return [
        {name: getattr(status, name) for name in _OF_WORST} for status in compared[:_MOST_WORST]
    ]


def _spread(
    statuses: Sequence[RankStatus], number: Callable[[EndedStep], float | None]
) -> dict[str, Any] | None:
    """Return the least and greatest of a number in the last step that has it on all ranks that have
    it at all, with their ranks; a rank without a finite number is named. None where none has it."""
    held = [{step.step: number(step) for step in status.ended} for status in statuses]
    known = [
        (status.rank, {step: value for step, value in own.items() if value is not None})
        for status, own in zip(statuses, held)
    ]
    known = [(rank, own) for rank, own in known if own]
    common = set.intersection(*(set(own) for _, own in known)) if known else set()
    if not common:
        return None
    step = max(common)
    values = sorted((own[step], rank) for rank, own in known if math.isfinite(own[step]))
    return {
        "step": step,
        "min": values[0][0] if values else None,
        "min_rank": values[0][1] if values else None,
        "max": values[-1][0] if values else None,
        "max_rank": values[-1][1] if values else None,
        "ranks": len(known),
        "not_finite": ranks_text(r for r, own in known if not math.isfinite(own[step])),
    }
