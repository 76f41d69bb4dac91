"""Data-parallel ranks that were handed the same batch: a warning, because nothing breaks.

Compared are the tensors that the root was handed, on lines of ranks that DDP, FSDP or a layout file
calls data. All of them that are no constants must be bitwise equal in every micro-batch of the
step: masks and positions are the same on all ranks anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.datapeers import DDP, data_lines, root_calls, wrapped_roots
from rankscope.diagnosis.stepview import SlotValues, StepView, root_of
from rankscope.record.finding import Kind, Severity
from rankscope.record.ranklists import ranks_named, ranks_text

__all__ = ["duplicate_batches"]

Array = NDArray[Any]


def duplicate_batches(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield one warning for the first step in which data-parallel ranks had the same inputs."""
    if step_view.is_setup or step_view.mode.word != "train":
        return
    every = [h for call in root_calls(step_view) for h in call.inputs if not h.is_constant]
    lines = data_lines(step_view, context) if every else {}
    for source, groups in lines.items():
        inputs = _of_wrapped(step_view, context, every) if source == DDP else every
        same = [line for line in groups if _is_shared(inputs, line)]
        for values in inputs:
            context.coverage.applied(values)
        place = ("", "duplicate")
        if same and place not in context.incarnation(step_view.incarnation).warned:
            context.incarnation(step_view.incarnation).warned.add(place)
            yield _candidate(step_view, inputs[0], source, same)
            return


def _of_wrapped(
    step_view: StepView, context: CheckContext, inputs: list[SlotValues]
) -> list[SlotValues]:
    """Return what roots were handed that are wrapped, or hold what is: a model beside them may be
    handed the same on all ranks (a reference, what measures the whole batch)."""
    incarnation = context.incarnation(step_view.incarnation)
    wrapped = incarnation.wrapped | wrapped_roots(step_view)
    return [values for values in inputs if root_of(values.call.path) in wrapped]


def _is_shared(inputs: list[SlotValues], line: Array) -> bool:
    on_one_line = [values for values in inputs if (values.at(line) >= 0).all()]
    return bool(on_one_line) and all(values.agree(line) is True for values in on_one_line)


def _candidate(
    step_view: StepView, values: SlotValues, source: str, lines: list[Array]
) -> Candidate:
    ranks = np.unique(np.concatenate(lines))

    def evidence() -> dict[str, Any]:
        return {"data_axis": source, "same_on": [ranks_text(line.tolist()) for line in lines[:8]]}

    return candidate_of(
        step_view,
        values,
        Kind.DUPLICATE,
        ranks,
        f"{ranks_named(ranks.tolist())} are data-parallel ({source}) and were handed the same "
        f"batch",
        severity=Severity.WARNING,
        evidence=evidence,
    )
