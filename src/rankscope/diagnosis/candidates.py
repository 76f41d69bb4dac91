"""What rules hand out: faulty places in the trace, before it is known which of them came first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.stepview import CallView, StepView
from rankscope.record.call import Mode, Phase
from rankscope.record.finding import Kind, Severity

__all__ = ["Candidate", "Coverage", "candidate_at"]

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


@dataclass(slots=True)
class Coverage:
    """How many values rules were applied to, and why they were not to others."""

    compared: int = 0
    with_others: int = 0
    """Those of `compared` that were compared with other values, of other ranks or calls."""
    recorded: int = 0
    undeclared: int = 0
    """Those of `compared` that several ranks hold, in a layout that nothing describes, and that
    were held to no others."""
    is_any_inside: bool = False
    """True once a value of a module below a root was seen."""
    skipped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _looked_at: set[int] = field(default_factory=set)

    def applied(self, values: object) -> None:
        """Count a value that was held to others, once however many rules look at it."""
        self.screened(values)
        if id(values) not in self._seen:
            self._seen.add(id(values))
            self.with_others += 1

    def screened(self, values: object) -> None:
        """Count a value that a rule looked at by itself."""
        if id(values) not in self._looked_at:
            self._looked_at.add(id(values))
            self.compared += 1

    def is_screened(self, values: object) -> bool:
        """True where a rule looked at the value."""
        return id(values) in self._looked_at

    def is_counted(self, values: object) -> bool:
        """True where the value was held to others."""
        return id(values) in self._seen

    def skip(self, reason: str, count: int = 1) -> None:
        """Count values that nothing could be said of."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def next_step(self) -> None:
        """Forget which values were counted: those of a step are gone with it."""
        self._seen.clear()
        self._looked_at.clear()

    def note(self, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.notes:
            self.notes.append(text)


NO_TIMES: Array = np.zeros(0, np.int64)
