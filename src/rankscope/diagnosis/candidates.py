"""What rules hand out: faulty places in the trace, before it is known which of them came first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.rankclock import times_of_value
from rankscope.diagnosis.stepview import CallView, SlotValues, StepView
from rankscope.record.call import Mode
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase

__all__ = ["Candidate", "candidate_at", "candidate_of"]

Array = NDArray[Any]


@dataclass(slots=True, eq=False, kw_only=True)
class Candidate:
    """A place where something is wrong."""

    kind: Kind
    phase: Phase
    mode: Mode
    step: int
    incarnation: int
    micro_batch: int | None
    path: str
    slot: str
    ranks: tuple[int, ...]
    """Whose value or call is wrong."""
    members: Array
    """Ranks that took part: the order of causes goes through them."""
    times_ns: Array
    """Per member when it happened, on the member's own clock."""
    message: str
    advice: str = ""
    """What to look at, where it is not what its kind and phase say."""
    severity: Severity = Severity.FAULT
    evidence: Callable[[], Mapping[str, Any]] = dict
    """Made when the finding is written: most candidates are victims, which need none."""
    weight: int = 1
    """Values it stands for."""
    priority: int = 0
    """Of two candidates at one place the lower is reported."""

    @property
    def place(self) -> str:
        """Path and slot, as people write them."""
        return f"{self.path or '(root)'}{f':{self.slot}' if self.slot else ''}"


def candidate_at(
    step_view: StepView,
    call: CallView,
    kind: Kind,
    slot: str,
    ranks: Array | tuple[int, ...] | list[int],
    members: Array,
    times_ns: Array,
    message: str,
    **more: Any,
) -> Candidate:
    """Return a candidate in a call of a step."""
    return Candidate(
        kind=kind,
        phase=call.phase,
        mode=step_view.mode,
        step=step_view.step,
        incarnation=step_view.incarnation,
        micro_batch=call.micro_batch,
        path=call.path,
        slot=slot,
        ranks=tuple(sorted({int(rank) for rank in ranks})),
        members=members,
        times_ns=times_ns,
        message=message,
        **more,
    )


def candidate_of(
    step_view: StepView,
    values: SlotValues,
    kind: Kind,
    ranks: Array | list[int],
    message: str,
    *,
    members: Array | None = None,
    **more: Any,
) -> Candidate:
    """Return a candidate in a value of a step, when its members had it: they are the faulty ranks
    where nothing else is said."""
    of = np.asarray(ranks) if members is None else members
    times_ns = times_of_value(values, of)
    return candidate_at(
        step_view, values.call, kind, values.slot, ranks, of, times_ns, message, **more
    )
