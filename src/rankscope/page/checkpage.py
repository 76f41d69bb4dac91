"""The page of `check`: one pass judges a trace and fills the map, a second reads the values behind
its cells, as many as a page holds."""

from __future__ import annotations

from typing import Any

from rankscope.diagnosis.check import check
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.stepview import StepView, step_view_of
from rankscope.diagnosis.verdictwords import layout_named
from rankscope.globs import glob_matches
from rankscope.layout.layoutfile import LayoutFile
from rankscope.page.calldetails import CallDetails
from rankscope.page.checkcells import CheckCells
from rankscope.page.pagecharts import CheckCharts
from rankscope.page.pagecontent import DATA_BYTES, PageContent, fitting
from rankscope.page.rankplaces import ranks_html
from rankscope.page.valuechoice import ValueChoice
from rankscope.page.verdicthtml import job_html
from rankscope.record.finding import Report
from rankscope.run.filenames import Progress
from rankscope.tree.selection import nothing_matched
from rankscope.tree.views import Trace

__all__ = ["check_page"]


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
        trace: an open trace.
        layouts: declared layouts, as of `check`.
        path: glob on the modules whose values it should hold; the map shows all of them.
        steps: numbers of the steps whose values it should hold; () for all.
        most_bytes: how much data the page may hold; fewer values are taken until it does.
        progress: told how far it is.

    Raises:
        LayoutError, TraceError: as of `check`.
        SelectionError: there is no such module.
    """
    cells = CheckCells(trace)
    charts = CheckCharts(cells.rows, cells.planes.world)

    def each_step(step_view: StepView, context: CheckContext) -> None:
        cells.note(step_view, context)
        charts.note(step_view)

    report = check(trace, layouts, progress=progress, each_step=each_step)
    cells.mark(report.findings)
    made = _CheckPage(trace, report, cells, path, steps)
    content = cells.content(
        report,
        charts.with_loss(),
        title=trace.path.name,
        job=job_html("", trace),
        ranks=ranks_html(trace),
        layout=layout_named(trace.run, layouts),
    )
    return fitting(content, made.chosen, made.details, most_bytes), report


class _CheckPage:
    """Chooses and reads the values of a page whose map is filled."""

    def __init__(
        self, trace: Trace, report: Report, cells: CheckCells, path: str, steps: tuple[range, ...]
    ) -> None:
        self._trace, self._report, self._cells = trace, report, cells
        self._path, self._steps = path, steps

    def chosen(self, limit: float) -> ValueChoice:
        """Return whose values the page holds, where so many entries fit."""
        cells, wanted = self._cells, self._steps
        if self._path == "*" and not wanted:
            return cells.chosen(self._report, limit)
        paths = cells.rows.paths
        rows = frozenset(n for n, path in enumerate(paths) if glob_matches(self._path, path))
        if not rows:
            raise nothing_matched("--path", self._path, paths)
        steps = [
            number
            for number, step in enumerate(cells.steps.all)
            if not wanted or (not step.is_setup and any(step.number in w for w in wanted))
        ]
        told = "The map shows everything; values are here as --path and --step asked for."
        return ValueChoice(dict.fromkeys(steps, rows), told)

    def details(self, choice: ValueChoice) -> list[dict[str, Any]]:
        """Return the values that were chosen."""
        cells, trace = self._cells, self._trace
        marked: dict[int, set[int]] = {}
        for finding in self._report.findings:
            row = cells.rows.known(finding.path)
            if row is not None:
                marked.setdefault(row, set()).update(finding.ranks)
        details = CallDetails(cells.rows, marked)
        for number, step in enumerate((*trace.setup, *trace.steps)):
            if number in choice.rows_of:
                view = step_view_of(step)
                details.add(number, view, cells.held[number], choice.rows_of[number])
        return details.calls
