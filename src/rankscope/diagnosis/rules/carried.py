"""Ranks whose backward begins with the gradients of the step before: `zero_grad` was skipped.

A reduction hides it: what DDP sums holds the old gradient of one rank, and all ranks get the same
wrong sum. So a rank marks the gradients that were there, and not zero, when its backward began.
Where ranks that hold the same parameter differ in that one of them is wrong. Ranks that are all
alike may accumulate over steps; and of a rank with marks next to ranks with some others nothing is
said, because on accelerators zeros are marked as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.distances import minority
from rankscope.diagnosis.rankclock import times_of_value
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named, ranks_text
from rankscope.record.value import ValueFlag

__all__ = ["carried_gradients"]

Array = NDArray[Any]
_CARRIED = int(ValueFlag.CARRIED)


def carried_gradients(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield one candidate for a step that some ranks began with gradients of the step before."""
    gradients = [h for h in step_view.values(Phase.GRADS) if h.slot.startswith("grad:")]
    marks = [(values, (values.flags & _CARRIED) != 0) for values in gradients]
    bearers = np.unique(np.concatenate([h.ranks[m] for h, m in marks] or [np.zeros(0, np.int64)]))
    shared = [(h, m) for h, m in marks if m.any() and not np.isin(h.ranks, bearers).all()]
    if shared:
        yield _candidate(step_view, context, [values for values, _ in shared], bearers)


def _candidate(
    step_view: StepView, context: CheckContext, gradients: list[SlotValues], bearers: Array
) -> Candidate:
    first = gradients[0]
    ranks = np.unique(np.concatenate([values.ranks for values in gradients]))
    own = ranks[np.isin(ranks, bearers)]
    others = ranks[~np.isin(ranks, bearers)]
    odd = minority(ranks, np.isin(ranks, bearers))
    blamed = odd if len(odd) < len(ranks) else own
    for values in gradients:
        context.coverage.applied(values)
    return candidate_at(
        step_view,
        first.call,
        Kind.REPLICA,
        first.slot,
        blamed,
        blamed,
        times_of_value(first, blamed) - 2,  # before gradients are reduced: see diagnosis/joins.py
        f"backward began with the gradients of the step before on {ranks_named(own.tolist())}, and "
        f"without on {ranks_named(others.tolist())}: they were added to this step's",
        advice="zero_grad was not called on every one of these ranks between the two backward "
        "passes: look for a condition around it that depends on the rank, or for a parameter group "
        "that one rank's optimizer lacks.",
        evidence=lambda: {
            "carried_by": ranks_text(own.tolist()),
            "not_by": ranks_text(others.tolist()),
            "gradients": len(gradients),
        },
        weight=len(gradients),
        priority=-2,
    )
