"""The pages of `check` and of `diff`.

One pass judges a trace and fills the map, a second reads the values behind its cells, as many as a
page holds. For `diff` cells say how far every value is from the reference's, in units of what
rounding explains.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.diagnosis.comparison.difference import ComparedValue
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences
from rankscope.diagnosis.comparison.tracesides import StepKey
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.evidence.lastcalls import ORDERLY, ends_of
from rankscope.diagnosis.evidence.stepview import CallView, SlotValues, StepView, step_view_of
from rankscope.globs import glob_matches
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import CallStatus, Mode
from rankscope.record.finding import Finding, Kind, Report, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.record.texts import visible
from rankscope.run.folders import Progress
from rankscope.tree.selection import nothing_matched
from rankscope.tree.step import StepHead
from rankscope.tree.views import Trace
from rankscope.words.page.calldetails import CallDetails, slot_detail
from rankscope.words.page.cellplanes import (
    CALL_KIND,
    CellClass,
    DistanceClass,
    ModuleRows,
    slot_kind,
)
from rankscope.words.page.pagecontent import DATA_BYTES, PageContent, PageMap, ValueChoice, fitting
from rankscope.words.page.verdicthtml import job_html, ranks_html

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
_TIMED: Final = (Phase.FORWARD, Phase.BACKWARD)


def check_page(
    trace: Trace,
    layouts: LayoutFile | None = None,
    *,
    path: str = "*",
    steps: tuple[range, ...] = (),
    most_bytes: int = DATA_BYTES,
    progress: Progress | None = None,
) -> tuple[PageContent, Report]:
    """Return the page of a trace, and the verdict it shows.

    Args:
        path: glob on the modules whose values it should hold; the map shows all of them.
        steps: numbers of the steps whose values it should hold; () for all.
        most_bytes: how much data the page may hold; fewer values are taken until it does.

    Raises:
        LayoutError, TraceError: as of `check`.
        SelectionError: there is no such module.
    """
    cells = _CheckCells(trace)
    charts = _CheckCharts(cells.rows, cells.planes.world)

    def each_step(step_view: StepView, context: CheckContext) -> None:
        cells.note(step_view, context)
        charts.note(step_view)

    report = check(trace, layouts, progress=progress, each_step=each_step)
    cells.mark(report.findings)
    content = cells.content(
        report,
        charts.with_loss(),
        title=trace.path.name,
        job=job_html("", trace),
        ranks=ranks_html(trace),
    )

    def choose(limit: float) -> ValueChoice:
        return _chosen(cells, report, path, steps, limit)

    def details(choice: ValueChoice) -> list[dict[str, Any]]:
        return cells.details(report.findings, choice)

    return fitting(content, choose, details, most_bytes), report


def _chosen(
    cells: _CheckCells, report: Report, path: str, spans: tuple[range, ...], limit: float
) -> ValueChoice:
    if path == "*" and not spans:
        return cells.chosen(report, limit)
    paths = cells.rows.paths
    rows = frozenset(row for row, p in enumerate(paths) if glob_matches(path, p))
    if not rows:
        raise nothing_matched("--path", path, paths)
    steps = [
        number
        for number, step in enumerate(cells.steps.all)
        if not spans or (not step.is_setup and any(step.step in w for w in spans))
    ]
    note = "The map shows everything; values are here as --path and --step asked for."
    return ValueChoice(dict.fromkeys(steps, rows), note)


class _CheckCells(PageMap):
    """What the rules judged, call by call and rank by rank, then the findings."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, CellClass)
        self._held: list[bytearray] = []
        """Of each step whether its values were judged, in the order of its calls and slots."""
        in_order = {*ORDERLY, EndReason.RUNNING.value} if trace.is_live else ORDERLY
        rank_states = trace.completeness["ranks"]
        self._ends = {(r["rank"], r["incarnation"]): str(r["end"]) for r in rank_states}
        self._broken = [rank for rank, end in ends_of(trace).items() if end not in in_order]
        self._last_of: dict[int, int] = {}
        """Step in which each of those made its last call."""
        self._called: dict[tuple[Phase, int], Array] = {}
        """[world] who ever made the calls of a module in a phase."""

    def note(self, step_view: StepView, context: CheckContext) -> None:
        """Take a step; hand this to `check` as `each_step`."""
        step = self.begin(
            StepHead(
                is_setup=step_view.is_setup,
                mode=step_view.mode,
                step=step_view.step,
                incarnation=step_view.incarnation,
            )
        )
        is_judged = bytearray()
        for call in (*step_view.calls, *step_view.left_by_passes):
            row = self.rows.of(call.path, call.node.class_name)
            if call.phase is Phase.FORWARD:
                self.rows.called(row)
            self.entries[step][row] += 1 + len(call.slots)
            is_judged += self._take(step, call, row, context)
        self._held.append(is_judged)
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
            if (cell := _OF_STATUS.get(outcome.status)) is not None:
                ranks = [r for r in outcome.ranks if self._ends.get((r, life)) not in ORDERLY]
                planes.raise_to(step, phase, CALL_KIND, row, ranks, cell)
        is_judged = bytearray()
        for slot, values in call.slots.items():
            is_held = coverage.was_held(values)
            is_judged.append(is_held)
            if values.dtype == "python":
                continue
            cells = np.full(len(values.ranks), CellClass.ALIKE if is_held else CellClass.NOT_JUDGED)
            cells[values.nonfinite > 0] = CellClass.NOT_FINITE
            planes.raise_to(step, phase, slot_kind(slot), row, values.ranks, cells)
        return is_judged

    def mark(self, findings: Iterable[Finding]) -> None:
        """Say on the map what was found, and what ranks that broke off did not call any more."""
        self._mark_missing()
        for finding in findings:
            step, row = self.steps.of_finding(finding), self.rows.known(finding.path)
            if finding.severity is not Severity.FAULT or step is None or row is None:
                continue
            cell = _OF_KIND.get(finding.kind, CellClass.DIFFERS)
            if finding.kind is Kind.CRASH:
                life = self.steps.all[step].incarnation
                ends = {self._ends.get((rank, life)) for rank in finding.ranks}
                if ends <= {EndReason.LOST.value}:  # killed: nothing raised
                    cell = CellClass.NOT_LEFT
            kind = slot_kind(finding.slot) if finding.slot else CALL_KIND
            ranks = [rank for rank in finding.ranks if rank < self.planes.world]
            self.planes.raise_to(step, finding.phase, kind, row, ranks, cell)
        self.planes.close()

    def details(self, findings: Iterable[Finding], choice: ValueChoice) -> list[dict[str, Any]]:
        marked: dict[int, set[int]] = {}
        for finding in findings:
            if (row := self.rows.known(finding.path)) is not None:
                marked.setdefault(row, set()).update(finding.ranks)
        details = CallDetails(self.rows, marked)
        for number, step in enumerate((*self._trace.setup, *self._trace.steps)):
            if number in choice.rows_of:
                view = step_view_of(step)
                details.add(number, view, self._held[number], choice.rows_of[number])
        return details.calls

    def _mark_missing(self) -> None:
        """A rank that broke off misses the calls that others made from its last step on."""
        for rank in self._broken:
            first = self._last_of.get(rank, 0)
            for step, phase, kind in self.planes.made():
                if kind != CALL_KIND or step < first:
                    continue
                plane = self.planes.plane(step, phase, kind)[: len(self.rows)]
                is_missing = plane.any(axis=1) & (plane[:, rank] == 0)
                for row in np.flatnonzero(is_missing).tolist():
                    # stages of a pipeline never call each other's modules: those are not missing
                    called = self._called[phase, row]
                    if called[rank] or rank not in self._last_of:
                        plane[row, rank] = CellClass.MISSING


class _CheckCharts:
    """The lines of the page: loss, gradients and updates by module, time by rank."""

    def __init__(self, rows: ModuleRows, world: int) -> None:
        self._rows, self._world = rows, world
        self._before: dict[tuple[int, str], Array] = {}
        self._scalars: list[dict[tuple[str, str], list[float | None]]] = []
        self.steps: list[dict[str, Any]] = []
        """Of each step: {"grad": {row: norm}, "update": {row: ratio}, "ms": {phase: [world]},
        "odd": [rows whose gradients or parameters are not finite]}."""

    @np.errstate(over="ignore", invalid="ignore")
    def note(self, step_view: StepView) -> None:
        """Take a step, in the order of the trace."""
        if step_view.is_setup:
            self._before.clear()
        gradients = self._gradients(step_view)
        chart: dict[str, Any] = {}
        odd = {
            self._rows.of(call.path)
            for call in step_view.of(Phase.GRADS, Phase.PARAMS)
            for values in call.slots.values()
            if values.dtype != "python" and values.nonfinite.any()
        }
        if odd:
            chart["odd"] = sorted(odd)
        if gradients:
            chart["grad"] = _roots(gradients)
        if updates := self._updates(step_view):
            chart["update"] = updates
        if times := self._times(step_view):
            chart["ms"] = times
        self.steps.append(chart)
        self._scalars.append(_scalars(step_view))

    def with_loss(self) -> list[dict[str, Any]]:
        """Return the steps, each with "loss": [mean, least, greatest of the ranks], nulls where it
        is not finite; without where more than one scalar may be the loss."""
        names = {name for scalars in self._scalars for name in scalars}
        names = {name for name in names if name[1].endswith("loss")} or names
        for step, scalars in zip(self.steps, self._scalars):
            if len(names) == 1 and names <= scalars.keys():
                step["loss"] = scalars[next(iter(names))]
        return self.steps

    def _gradients(self, step_view: StepView) -> dict[int, float]:
        """Return the sum of squares of all gradients of each module, of its last optimizer step."""
        squares: dict[int, float] = {}
        ordinals: dict[int, int] = {}
        for call in step_view.of(Phase.GRADS):
            row = self._rows.of(call.path)
            if ordinals.get(row, -1) != call.ordinal:
                ordinals[row], squares[row] = call.ordinal, 0.0
            for values in _named(call, "grad:"):
                norm, _ = _whole(values)
                if norm is not None:
                    squares[row] += norm * norm
        return squares

    def _updates(self, step_view: StepView) -> dict[int, float]:
        """Return how far the parameters of each module went, over their norm, by sketches."""
        moved: dict[int, list[float]] = {}
        for call in step_view.of(Phase.SETUP, Phase.PARAMS):
            row = self._rows.of(call.path)
            for values in _named(call, "param:"):
                norm, sketch = _whole(values)
                if sketch is None:
                    continue
                before = self._before.get((row, values.slot))
                self._before[row, values.slot] = sketch
                if before is not None and norm and call.phase is Phase.PARAMS:
                    squares = moved.setdefault(row, [0.0, 0.0])
                    squares[0] += float(((sketch - before) ** 2).mean())
                    squares[1] += norm * norm
        return _roots({row: far / of for row, (far, of) in moved.items() if of})

    def _times(self, step_view: StepView) -> dict[str, list[float]]:
        """Return how long the outermost calls of a phase took on each rank, in ms."""
        times_of = {phase: np.zeros(self._world) for phase in _TIMED}
        for call in step_view.of(*_TIMED):
            if call.parent is None:
                begin, end = call.span(call.ranks)
                times_of[call.phase][call.ranks] += (end - begin) / 1e6
        return {
            phase.word: [round(float(ms), 3) for ms in times]
            for phase, times in times_of.items()
            if times.any()
        }


def _scalars(step_view: StepView) -> dict[tuple[str, str], list[float | None]]:
    """Return mean, least and greatest over ranks of the scalars that outermost calls of a train
    step return; of each rank the mean of its micro-batches."""
    scalars: dict[tuple[str, str], list[SlotValues]] = {}
    is_train = step_view.mode is Mode.TRAIN and not step_view.is_setup
    for call in step_view.of(Phase.FORWARD) if is_train else ():
        for values in call.outputs if call.parent is None else ():
            shapes = {shape for view in values.views for shape in view.shapes().values()}
            if "float" in values.dtype and shapes == {()} and values.is_known.all():
                scalars.setdefault((call.path, values.slot), []).append(values)
    return {name: _spread(values) for name, values in scalars.items()}


def _spread(micro_batches: list[SlotValues]) -> list[float | None]:
    if any(v.nonfinite.any() or v.column("neginf").any() for v in micro_batches):
        return [None, None, None]
    ranks = np.concatenate([values.ranks for values in micro_batches])
    means = np.concatenate([values.column("mean") for values in micro_batches])
    of_ranks = [float(means[ranks == rank].mean()) for rank in np.unique(ranks)]
    return [sum(of_ranks) / len(of_ranks), min(of_ranks), max(of_ranks)]


def _named(call: CallView, prefix: str) -> list[SlotValues]:
    return [
        values
        for slot, values in call.slots.items()
        if slot.startswith(prefix) and values.dtype != "python" and len(values.views) == 1
    ]


def _whole(values: SlotValues) -> tuple[float | None, Array | None]:
    """Return norm and sketch of the whole value, by its shards or by the lowest rank."""
    if combined := values.views[0].combined:
        sketch = combined[0].sketch
        norm = combined[0].l2
        is_known = norm is not None and np.isfinite(norm)
        return (norm if is_known else None), None if sketch is None else np.asarray(sketch)
    if not values.is_known[0]:
        return None, None
    norm = float(values.column("l2")[0])
    return (norm if np.isfinite(norm) else None), np.asarray(values.column("sketch")[0], float)


def _roots(squares: dict[int, float]) -> dict[int, float]:
    """Return the roots, four digits of each; without those of numbers too large to be squared."""
    return {row: float(f"{np.sqrt(s):.4g}") for row, s in squares.items() if np.isfinite(s)}


_UNBOUNDED: Final = 1e300
_LIMITS: Final = (0.0, 0.1, 1.0, 10.0, 100.0)
"""Greatest ratios of an error to what is allowed in the classes from SAME on."""
_BY_DEPTH: Final = {
    Phase.FORWARD: "output",
    Phase.BACKWARD: "grad_input",
    Phase.GRADS: "grad",
    Phase.PARAMS: "param",
}
"""Whose errors are drawn over the modules, by phase."""


def diff_page(
    ref: Trace, test: Trace, compare: Callable[..., Report] | None = None
) -> tuple[PageContent, Report]:
    """Return the page of two traces, and the verdict it shows. `compare`: `diff` of these traces
    with all its options but `each_step`; None for no options."""
    cells = _DiffCells(test)
    report = (compare or functools.partial(diff, ref, test))(each_step=cells.note)
    content = cells.content(
        report,
        cells.charts,
        title=f"{test.path.name} beside {ref.path.name}",
        job=job_html("reference ", ref) + job_html("this run ", test),
        ranks=ranks_html(test, reads_calls=False),
    )
    page = fitting(content, lambda limit: cells.chosen(report, limit), cells.details, DATA_BYTES)
    return page, report


class _DiffCells(PageMap):
    def __init__(self, test: Trace) -> None:
        super().__init__(test, DistanceClass)
        self.charts: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        for step in (*test.setup, *test.steps):  # rows in the order of the tree
            for node in step.passing():
                row = self.rows.of(node.path, node.class_name)
                if node.phase is Phase.FORWARD:
                    self.rows.called(row)
            if not step.is_setup:
                break

    def note(self, key: StepKey | None, step_diff: StepDifferences, wrong: Collection[int]) -> None:
        """Take a step; hand this to `diff` as `each_step`."""
        mode, number = key or (Mode.TRAIN, 0)
        step = self.begin(StepHead(is_setup=key is None, mode=mode, step=number, incarnation=0))
        calls: dict[tuple[int, Phase, int], dict[str, Any]] = {}
        errors: defaultdict[str, dict[str, dict[int, float]]] = defaultdict(
            lambda: {"error": {}, "noise": {}}
        )
        for compared in step_diff.compared:
            values = compared.value.first_test
            row = self.rows.of(values.call.node.path)
            is_wrong = id(compared) in wrong
            kind = slot_kind(values.slot)
            for ranks, cell in _classes(compared, is_wrong=is_wrong):
                inside = ranks[ranks < self.planes.world]
                self.planes.raise_to(step, compared.key.phase, kind, row, inside, cell)
            self._add(calls, step, row, compared)
            is_judged = not compared.reason and (is_wrong or not compared.is_left)
            if is_judged and kind == _BY_DEPTH.get(compared.key.phase):
                drawn = errors[compared.key.phase.word]
                for line, distance in (("error", compared.error), ("noise", compared.allowed)):
                    drawn[line][row] = max(_finite(distance), drawn[line].get(row, 0.0))
        for alone in (*step_diff.aligned.only_ref, *step_diff.aligned.only_test):
            row = self.rows.of(alone.path)
            all_ranks = slice(None)
            self.planes.raise_to(
                step, alone.phase, CALL_KIND, row, all_ranks, DistanceClass.MISSING
            )
        self.charts.append({"error": dict(errors)} if errors else {})
        self._calls += calls.values()
        self.planes.close()

    def _add(
        self,
        calls: dict[tuple[int, Phase, int], dict[str, Any]],
        step: int,
        row: int,
        compared: ComparedValue,
    ) -> None:
        key, value = compared.key, compared.value
        call = calls.get((row, key.phase, key.ordinal))
        if call is None:
            node = value.first_test.call.node
            call = {"m": row, "t": step, "p": key.phase.word, "r": node.ranks_text}
            call |= {"us": [None, None, None], "s": []}
            if key.ordinal:
                call["o"] = key.ordinal
            if value.call.path != node.path:
                call["w"] = visible(f"{value.call.path or '(root)'} of the reference")
            calls[row, key.phase, key.ordinal] = call
        call["s"].append(_slot(compared))
        self.entries[step][row] += 2

    def details(self, choice: ValueChoice) -> Iterator[dict[str, Any]]:
        for call in self._calls:
            rows = choice.rows_of.get(call["t"], frozenset())
            if rows is None or call["m"] in rows:
                yield call


def _classes(compared: ComparedValue, *, is_wrong: bool) -> Iterator[tuple[Any, DistanceClass]]:
    """Yield ranks and the class of their values. A value that is off by more than rounding and no
    fault is judged by another value, as a summand by its sum, or follows from moved inputs."""
    all_ranks = compared.value.test_ranks
    if compared.is_missing:
        yield all_ranks, DistanceClass.MISSING
    elif compared.difference is None or compared.reason:
        yield all_ranks, DistanceClass.NOT_COMPARED
    else:
        ratios = np.asarray(compared.errors) / max(compared.allowed, 1e-300)
        classes = DistanceClass.SAME + np.searchsorted(_LIMITS, ratios)  # NaN is behind all
        if is_wrong:
            is_used = compared.difference.partial  # the sum is right; each part is used as it is
            classes = np.maximum(classes, DistanceClass.BEYOND if is_used else DistanceClass.ABOVE)
        else:
            greatest = DistanceClass.NOT_COMPARED if compared.is_left else DistanceClass.BELOW
            classes[classes > DistanceClass.BELOW] = greatest
        for cell in DistanceClass:
            if (classes == cell).any():
                yield compared.difference.ranks(classes == cell), cell


def _slot(compared: ComparedValue) -> dict[str, Any]:
    value = compared.value
    slot: dict[str, Any] = {
        "n": visible(value.first_test.slot),
        "d": " | ".join(sorted(map(visible, value.dtypes))),
        "sides": [
            ["reference", slot_detail(value.first_ref)],
            ["this run", slot_detail(value.first_test)],
        ],
    }
    if compared.difference is not None:
        slot["error"] = _finite(compared.error)
        slot["allowed"] = _finite(compared.allowed)
        if compared.difference.partial:
            slot["summed"] = 1
    if compared.reason:
        slot["reason"] = visible(compared.reason)
    return slot


def _finite(error: float) -> float:
    """Return four digits of a distance; for one without bound, one that the page says so of."""
    return float(f"{error:.4g}") if np.isfinite(error) else _UNBOUNDED
