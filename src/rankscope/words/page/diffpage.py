"""The page of `diff`: how far every value is from the reference's, in units of what rounding
explains."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.comparison.diff import diff
from rankscope.diagnosis.comparison.difference import ComparedValue
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences
from rankscope.diagnosis.comparison.tracesides import StepKey
from rankscope.record.call import Mode
from rankscope.record.finding import Report
from rankscope.record.phases import Phase
from rankscope.record.texts import visible
from rankscope.tree.step import StepHead
from rankscope.tree.views import Trace
from rankscope.words.page.calldetails import slot_detail
from rankscope.words.page.cellplanes import CALL_KIND, DistanceClass, slot_kind
from rankscope.words.page.pagecontent import DATA_BYTES, PageContent, PageMap, ValueChoice, fitting
from rankscope.words.page.verdicthtml import job_html, ranks_html

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
            row = self.rows.of(values.call.path)
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
