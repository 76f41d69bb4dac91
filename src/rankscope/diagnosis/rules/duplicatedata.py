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

from rankscope.diagnosis.candidates import Candidate, suspect_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.datapeers import data_lines, root_calls
from rankscope.diagnosis.stepview import SlotValues, StepView
from rankscope.record.finding import Kind, Severity
from rankscope.record.ranklists import ranks_named, ranks_text

__all__ = ["duplicate_batches"]

Array = NDArray[Any]


def duplicate_batches(moment: StepView, scene: CheckContext) -> Iterator[Candidate]:
    """Yield one warning for the first step in which data-parallel ranks had the same inputs."""
    if moment.is_setup or moment.mode.word != "train":
        return
    inputs = [h for call in root_calls(moment) for h in call.inputs if not h.is_constant]
    lines = data_lines(moment, scene) if inputs else {}
    for source, groups in lines.items():
        same = [line for line in groups if _is_shared(inputs, line)]
        for held in inputs:
            scene.ledger.applied(held)
        place = ("", "duplicate")
        if same and place not in scene.life(moment.incarnation).warned:
            scene.life(moment.incarnation).warned.add(place)
            yield _suspect(moment, scene, inputs[0], source, same)
            return


def _is_shared(inputs: list[SlotValues], line: Array) -> bool:
    held_by_line = [held for held in inputs if (held.at(line) >= 0).all()]
    return bool(held_by_line) and all(held.agree(line) is True for held in held_by_line)


def _suspect(
    moment: StepView, scene: CheckContext, held: SlotValues, source: str, lines: list[Array]
) -> Candidate:
    ranks = np.unique(np.concatenate(lines))

    def evidence() -> dict[str, Any]:
        return {"data_axis": source, "same_on": [ranks_text(line.tolist()) for line in lines[:8]]}

    return suspect_at(
        moment,
        held.call,
        Kind.DUPLICATE,
        held.slot,
        ranks,
        ranks,
        scene.times(held, ranks),
        f"{ranks_named(ranks.tolist())} are data-parallel ({source}) and were handed the same "
        f"batch",
        severity=Severity.WARNING,
        evidence=evidence,
    )
