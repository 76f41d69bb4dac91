"""Why nothing was traced: what the ranks told of themselves, and how the job ended."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.record.ranklists import ranks_named
from rankscope.run.reached import Reached, Stage

__all__ = ["why_nothing"]


def why_nothing(ranks: Sequence[Reached], error: BaseException | None) -> str:
    """Return the line.

    Args:
        ranks: how far those of this host came.
        error: what left torchrun; None where the job did not fail.
    """
    refused = [one for one in ranks if one.stage is Stage.REFUSED]
    if refused:
        alike = [one.rank for one in refused if one.text == refused[0].text]
        return f"nothing was traced: {ranks_named(alike)}: {refused[0].text}"
    if not ranks:
        did = "no rank started a Python that has rankscope"
    elif all(one.stage in (Stage.PYTHON, Stage.NO_TORCH) for one in ranks):
        did = "no rank imported torch"
    elif left_out := [one.rank for one in ranks if one.stage is Stage.UNSELECTED]:
        did = f"no rank but {ranks_named(left_out)}, left out by --rs-ranks, called a torch module"
    else:
        did = "no rank called a torch module"
    advice = "" if ranks else " (is it installed there? `rankscope doctor` looks)"
    return f"nothing was traced: {did}{_before(error)}{advice}"


def _before(error: BaseException | None) -> str:
    """Return what ended the job before a module was called, "" where nothing of note did."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    if isinstance(error, KeyboardInterrupt):
        return " before SIGINT ended the job"
    number = getattr(error, "sigval", None)  # of torch's SignalException
    return f" before {number.name} ended the job" if number else " before the job failed"
