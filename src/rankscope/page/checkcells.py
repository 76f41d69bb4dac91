"""The map of `check`: what the rules judged and found, call by call and rank by rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.endings import ends_of
from rankscope.diagnosis.lastcalls import ORDERLY
from rankscope.diagnosis.stepview import CallView, StepView
from rankscope.page.cellplanes import CALL_KIND, CellClass, slot_kind
from rankscope.page.pagecontent import PageMap
from rankscope.page.pagesteps import PageStep
from rankscope.record.call import CallStatus
from rankscope.record.finding import Finding, Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.streams import EndReason
from rankscope.tree.views import Trace

__all__ = ["CheckCells"]

Array = NDArray[Any]
_OF_STATUS: Final = {
    CallStatus.RAISED.word: CellClass.RAISED,
    CallStatus.ABANDONED.word: CellClass.NOT_LEFT,
    CallStatus.UNFINISHED.word: CellClass.NOT_LEFT,
}
"""Of calls on ranks that did not end in order: a program may catch what a call raises."""
_OF_KIND: Final = {
    Kind.STRUCTURE: CellClass.MISSING,
    Kind.HANG: CellClass.MISSING,
    Kind.NONFINITE: CellClass.NOT_FINITE,
    Kind.CRASH: CellClass.RAISED,
}
"""What findings make of their cells; the others say that they differ."""


class CheckCells(PageMap):
    """Takes every step that `check` has been through; then the findings."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, CellClass)
        self.held: list[bytearray] = []
        """Of each step whether its values were judged, in the order of its calls and slots."""
        in_order = {*ORDERLY, EndReason.RUNNING.value} if trace.is_live else ORDERLY
        every = trace.completeness["ranks"]
        self._ends = {(r["rank"], r["incarnation"]): str(r["end"]) for r in every}
        self._broken = [rank for rank, end in ends_of(trace).items() if end not in in_order]
        self._last_of: dict[int, int] = {}
        """Step in which each of those made its last call."""
        self._called: dict[tuple[Phase, int], Array] = {}
        """[world] who ever made the calls of a module in a phase."""

    def note(self, step_view: StepView, context: CheckContext) -> None:
        """Take a step; hand this to `check` as `each_step`."""
        step = self.begin(
            PageStep(
                step_view.mode, step_view.step, step_view.incarnation, is_setup=step_view.is_setup
            )
        )
        held = bytearray()
        for call in (*step_view.calls, *step_view.left_by_passes):
            row = self.rows.of(call.path, call.node.class_name)
            if call.phase is Phase.FORWARD:
                self.rows.called(row)
            self.entries[step][row] += 1 + len(call.slots)
            held += self._take(step, call, row, context)
        self.held.append(held)
        self.planes.close()

    def _take(self, step: int, call: CallView, row: int, context: CheckContext) -> bytearray:
        phase, planes, coverage = call.phase, self.planes, context.coverage
        planes.raise_to(step, phase, CALL_KIND, row, call.ranks, CellClass.NOT_JUDGED)
        called = self._called.get((phase, row))
        if called is None:
            called = self._called[phase, row] = np.zeros(planes.world, bool)
        called[call.ranks] = True
        for rank in self._broken:
            if rank in call.ranks:
                self._last_of[rank] = step
        life = self.steps.all[step].incarnation
        for outcome in () if call.node.has_returned else call.node.outcomes:
            cell = _OF_STATUS.get(outcome.status)
            if cell is not None:
                ranks = [r for r in outcome.ranks if self._ends.get((r, life)) not in ORDERLY]
                planes.raise_to(step, phase, CALL_KIND, row, ranks, cell)
        held = bytearray()
        for slot, values in call.slots.items():
            is_held = coverage.was_held(values)
            held.append(is_held)
            if values.dtype == "python":
                continue
            cells = np.full(len(values.ranks), CellClass.ALIKE if is_held else CellClass.NOT_JUDGED)
            cells[values.nonfinite > 0] = CellClass.NOT_FINITE
            planes.raise_to(step, phase, slot_kind(slot), row, values.ranks, cells)
        return held

    def mark(self, findings: Iterable[Finding]) -> None:
        """Say on the map what was found, and what ranks that broke off did not call any more."""
        self._mark_missing()
        for finding in findings:
            step, row = self.steps.of_finding(finding), self.rows.known(finding.path)
            if finding.severity is not Severity.FAULT or step is None or row is None:
                continue
            cell = _OF_KIND.get(finding.kind, CellClass.DIFFERS)
            if finding.kind is Kind.CRASH and self._are_lost(finding.ranks, step):
                cell = CellClass.NOT_LEFT
            kind = slot_kind(finding.slot) if finding.slot else CALL_KIND
            ranks = [rank for rank in finding.ranks if rank < self.planes.world]
            self.planes.raise_to(step, finding.phase, kind, row, ranks, cell)
        self.planes.close()

    def _are_lost(self, ranks: Iterable[int], step: int) -> bool:
        """True for ranks that were killed: nothing raised."""
        life = self.steps.all[step].incarnation
        return all(self._ends.get((rank, life)) == EndReason.LOST.value for rank in ranks)

    def _mark_missing(self) -> None:
        """A rank that broke off misses the calls that others made from its last step on."""
        for rank in self._broken:
            first = self._last_of.get(rank, 0)
            for step, phase, kind in self.planes.made():
                if kind != CALL_KIND or step < first:
                    continue
                plane = self.planes.plane(step, phase, kind)[: len(self.rows)]
                made = plane.any(axis=1) & (plane[:, rank] == 0)
                for row in np.flatnonzero(made).tolist():
                    called = self._called[phase, row]
                    if called[rank] or rank not in self._last_of:
                        plane[row, rank] = CellClass.MISSING
