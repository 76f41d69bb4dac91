"""Why nothing was traced: how far the ranks came, as they noted themselves, and what ended the job.

Ranks append lines `<rank> <pid> <stage> <text>` to the file `reached` of the run folder: the first
stages are told by `startup`, those behind by `rankscope.agent.activation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rankscope.record.ranks import ranks_named
from rankscope.run.folders import REACHED_NAME
from rankscope.run.jobstatus import has_failed, signal_of

__all__ = ["Reached", "reached_by_processes", "why_nothing"]

_STAGES = ("python", "no-torch", "torch", "no-call", "unselected", "refused")
"""The least first: a Python with rankscope began; it ended without torch; torch was imported; it
ended without the call of a module; `--rs-ranks` leaves the rank out; tracing could not begin."""


class Reached(NamedTuple):
    """How far a process of a rank came."""

    rank: int
    pid: int
    stage: str
    text: str
    """Of the exception that ended it, or why tracing could not begin."""


def reached_by_processes(run_folder: Path) -> list[Reached]:
    """Return what the processes of ranks, and those that these start, noted one after the other."""
    noted: list[Reached] = []
    with contextlib.suppress(OSError):
        for line in (run_folder / REACHED_NAME).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # torn, on a full disk
                rank, pid, stage, text = line.split(" ", 3)
                _STAGES.index(stage)
                noted.append(Reached(int(rank), int(pid), stage, text))
    return noted


def why_nothing(noted: Sequence[Reached], error: BaseException | None) -> str:
    """Return the line on a job of which no rank opened a spool.

    Args:
        noted: how far processes of this host came.
        error: what left torchrun; None where the job did not fail.
    """
    furthest: dict[int, Reached] = {}
    for one in noted:
        before = furthest.get(one.rank, one)
        if _STAGES.index(one.stage) >= _STAGES.index(before.stage):
            furthest[one.rank] = one
    ranks = [furthest[rank] for rank in sorted(furthest)]
    refused = [one for one in ranks if one.stage == "refused"]
    if refused:
        alike = [one.rank for one in refused if one.text == refused[0].text]
        return f"nothing was traced: {ranks_named(alike)}: {refused[0].text}"
    left_out = [one.rank for one in ranks if one.stage == "unselected"]
    did = "called a torch module"
    if all(one.stage in ("python", "no-torch") for one in ranks):
        did = "imported torch" if ranks else "started a Python that has rankscope"
    who = f"no rank but {ranks_named(left_out)}, left out by --rs-ranks," if left_out else "no rank"
    advice = "" if ranks else " (is it installed there? `rankscope doctor` looks)"
    return f"nothing was traced: {who} {did}{_before(error)}{advice}"


def _before(error: BaseException | None) -> str:
    if not has_failed(error):
        return ""
    name = signal_of(error)
    return f" before {name} ended the job" if name else " before the job failed"
