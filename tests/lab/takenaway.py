"""`python -m tests.lab.takenaway`: checks the golden records with one piece of evidence taken away.

A trace seldom holds all that rules could use: `--rs-phases` and `--rs-paths` leave values out,
`--rs-steps` begins late or skips steps, older traces lack facts. Less evidence may cost findings,
and it may move one to a later place. It must never make a fault: a line is written for every fault
of a kind, at a place, that the whole record does not show, and the exit code is 1.

    python -m tests.lab.takenaway                 # all boards: about a quarter of an hour
    python -m tests.lab.takenaway real --only fsdp --without setup backward
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from unittest import mock

import numpy as np

import rankscope.diagnosis.check as check_module
from rankscope.diagnosis.check import check
from rankscope.diagnosis.evidence import matchedcollectives
from rankscope.diagnosis.evidence.stepview import CallView, SlotValues, StepView, step_view_of
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.finding import Kind, Report, Severity
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Step
from tests.lab.golden import BOARDS, Job, read_jobs, rebuilt, unpacked

View = Callable[[StepView], StepView]
Steps = Callable[[Sequence[Step]], Sequence[Step]]


def _without_calls(wanted: Callable[[CallView], bool]) -> View:
    """Leave calls out; what was below them stands below what is left above."""

    def of(view: StepView) -> StepView:
        calls = [call for call in view.calls if not wanted(call)]
        kept = set(map(id, calls))
        for call in calls:
            while call.parent is not None and id(call.parent) not in kept:
                call.parent = call.parent.parent
            call.children = []
        for call in calls:
            call.top = call if call.parent is None else call.parent.top
            if call.parent is not None:
                call.parent.children.append(call)
        return replace(view, calls=calls)

    return of


def _without_slots(wanted: Callable[[SlotValues], bool]) -> View:
    def of(view: StepView) -> StepView:
        for call in view.calls:
            call.slots = {s: values for s, values in call.slots.items() if not wanted(values)}
        return view

    return of


def _undigested(wanted: Callable[[SlotValues], Any]) -> View:
    """Have values lack their digest on some ranks: `wanted` says which of a value's."""

    def of(view: StepView) -> StepView:
        for call in view.calls:
            for values in call.slots.values():
                values.is_known = values.is_known & ~np.asarray(wanted(values))
        return view

    return of


def _without_mode(view: StepView) -> StepView:
    return view if view.is_setup else replace(view, mode=Mode.UNKNOWN)


def _is_inside(call: CallView) -> bool:
    return call.phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD) and bool(call.path)


def _is_container(call: CallView) -> bool:
    return _is_inside(call) and bool(call.children)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of evidence, and how a trace lacks it."""

    view: View = lambda view: view
    steps: Steps = lambda steps: steps
    settings: Mapping[str, str] = field(default_factory=dict)
    """As the job that records no such thing would have them."""


def _phases(*left_out: Phase) -> str:
    return ",".join(phase.word for phase in Phase if phase not in left_out)


def _without_phases(*phases: Phase) -> Piece:
    def view(view: StepView) -> StepView:
        if Phase.ACCUMULATED in phases:
            view = replace(view, left_by_passes=())
        return _without_calls(lambda call: call.phase in phases)(view)

    return Piece(view=view, settings={"phases": _phases(*phases)})


def _without_slot(kind: str) -> Piece:
    """Leave out slots that begin so: no glob can say that, but those that name all others can."""
    return Piece(
        view=_without_slots(lambda values: values.slot.startswith(kind)),
        settings={"slots": "of another kind"},
    )


def _without_ranks(wanted: Callable[[Any], Any]) -> Piece:
    """Have some ranks lack the digests of all values: as if a copy had not been done in time."""
    return Piece(view=_undigested(lambda values: wanted(values.ranks)))


PIECES: Final = MappingProxyType(
    {
        "setup": _without_phases(Phase.SETUP),
        "forward": _without_phases(Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD),
        "recompute": _without_phases(Phase.RECOMPUTE),
        "backward": _without_phases(Phase.BACKWARD),
        "grads": _without_phases(Phase.GRADS),
        "params": _without_phases(Phase.PARAMS),
        "collectives": _without_phases(Phase.COLLECTIVE),
        "passes": _without_phases(Phase.ACCUMULATED),
        "all but grads": _without_phases(*(p for p in Phase if p is not Phase.GRADS)),
        "all but forward": _without_phases(*(p for p in Phase if p is not Phase.FORWARD)),
        "modules inside": Piece(view=_without_calls(_is_inside)),
        "containers": Piece(view=_without_calls(_is_container), settings={"paths": "leaves"}),
        "root": Piece(
            view=_without_calls(lambda call: call.path == "" and call.phase.facts.is_activation),
            settings={"paths": "?*"},
        ),
        "inputs": _without_slot("input"),
        "outputs": _without_slot("output"),
        "parameters": _without_slot("param:"),
        "gradients": _without_slot("grad:"),
        "buffers": _without_slot("buffer"),
        "digests of rank 0": _without_ranks(lambda ranks: ranks == 0),
        "digests of rank 1": _without_ranks(lambda ranks: ranks == 1),
        "digests of odd ranks": _without_ranks(lambda ranks: ranks % 2 == 1),
        "mode": Piece(view=_without_mode),
        "the first step": Piece(steps=lambda s: [e for e in s if e.is_setup or e.step > 0]),
        "setup and the first step": Piece(
            steps=lambda s: [e for e in s if not e.is_setup and e.step > 0]
        ),
        "every second step": Piece(steps=lambda s: [e for e in s if e.is_setup or e.step % 2]),
        "all but the last step": Piece(steps=lambda s: [e for e in s if e.is_setup or e is s[-1]]),
    }
)


def _checked(trace: Path, layouts: LayoutFile | None, piece: Piece) -> Report:
    opened = open_trace(trace)
    chosen = piece.steps([*opened.setup, *opened.steps])
    opened.setup = tuple(step for step in chosen if step.is_setup)
    opened.steps = tuple(step for step in chosen if not step.is_setup)
    opened.run["settings"] = {**opened.run.get("settings", {}), **piece.settings}

    def read(step: Step) -> StepView:
        return piece.view(step_view_of(step))

    with (
        mock.patch.object(check_module, "step_view_of", read),
        mock.patch.object(matchedcollectives, "step_view_of", read),
    ):
        return check(opened, layouts)


def _places(report: Report) -> set[tuple[str, str]]:
    """Return kind and layer of every fault."""
    faults = (f for f in report.findings if f.severity is Severity.FAULT)
    return {(f.kind.value, f.path) for f in faults}


def new_faults(records: Path, pieces: Sequence[str], job: Job) -> list[str]:
    """Return a line for every fault of one job that only less evidence shows."""
    with rebuilt(records, job) as ((trace,), layouts):
        whole = _checked(trace, layouts, Piece())
        known, kinds = _places(whole), {f.kind for f in whole.findings}
        backward = {(f.kind, f.phase) for f in whole.findings if f.phase is Phase.BACKWARD}
        lines = []
        for piece in pieces:
            try:
                report = _checked(trace, layouts, PIECES[piece])
            except Exception:
                lines.append(f"without {piece}: {traceback.format_exc()}")
                continue
            for finding in report.findings:
                if finding.severity is not Severity.FAULT or not finding.is_origin:
                    continue
                if (finding.kind.value, finding.path) in known:
                    continue
                if finding.kind is Kind.NONFINITE and finding.kind in kinds:
                    continue  # true wherever it is seen first
                is_of_output = finding.slot.startswith("grad_output")
                if is_of_output and (finding.kind, finding.phase) in backward:
                    continue  # only forward tensors tell which module took the tensor
                how = "" if known else "A RIGHT PROGRAM: "
                how += "" if finding.kind in kinds else "new kind: "
                lines.append(f"without {piece}: {how}{finding.kind.value}: {finding.message[:200]}")
        return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.takenaway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("boards", nargs="*", choices=[*BOARDS, []], help="all by default")
    parser.add_argument("--only", default="", help="jobs with this in their names")
    parser.add_argument("--without", nargs="*", choices=PIECES, default=[*PIECES])
    given = parser.parse_args()
    count = wrong = 0
    for board in given.boards or BOARDS:
        jobs = {n: j for n, j in read_jobs(board).items() if given.only in n and j.asked == "check"}
        with unpacked(board) as records, ProcessPoolExecutor(os.cpu_count()) as pool:
            work = functools.partial(new_faults, records, given.without)
            for name, lines in zip(jobs, pool.map(work, jobs.values()), strict=True):
                for line in lines:
                    print(f"{board}: {name}: {line}", flush=True)
                count, wrong = count + 1, wrong + bool(lines)
    print(f"{count} jobs, {wrong} with faults that only less evidence shows")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
