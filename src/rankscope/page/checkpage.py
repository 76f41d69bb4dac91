"""The page of `check`: one pass judges a trace and fills the map, a second reads the values behind
its cells, as many as a page holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

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
from rankscope.tree.joinedcolumns import as_arrays
from rankscope.tree.selection import nothing_matched
from rankscope.tree.views import Trace

__all__ = ["EVERYTHING", "PageWish", "check_page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWish:
    """Whose values a page should hold; the map shows every module and step."""

    path: str = "*"
    """Glob on paths."""
    steps: tuple[range, ...] = ()
    """Numbers of steps; () for all."""

    @property
    def is_narrow(self) -> bool:
        """True where something else than everything is asked for."""
        return self.path != "*" or bool(self.steps)


EVERYTHING: Final = PageWish()


def check_page(
    trace: Trace,
    layouts: LayoutFile | None = None,
    *,
    wish: PageWish = EVERYTHING,
    most_bytes: int = DATA_BYTES,
    progress: Progress | None = None,
) -> tuple[PageContent, Report]:
    """Return the page of a trace, and the verdict it shows.

    Args:
        trace: an open trace.
        layouts: declared layouts, as of `check`.
        wish: whose values it should hold.
        most_bytes: how much data the page may hold; fewer values are taken until it does.
        progress: told how far it is.

    Raises:
        LayoutError, TraceError: as of `check`.
        SelectionError: the wish names no module.
    """
    cells = CheckCells(trace)
    charts = CheckCharts(cells.rows, cells.planes.world)

    known: list[CheckContext] = []

    def each_step(step_view: StepView, context: CheckContext) -> None:
        cells.note(step_view, context)
        charts.note(step_view, context)
        known[:] = [context]

    report = check(trace, layouts, progress=progress, each_step=each_step)
    cells.mark(report.findings)
    made = _CheckPage(trace, report, cells, wish)
    content = cells.content(
        report,
        charts.with_loss(),
        title=trace.path.name,
        job=job_html("", trace),
        ranks=ranks_html(trace, known[0] if known else None),
        layout=layout_named(trace.run, layouts),
    )
    return fitting(content, made.chosen, made.details, most_bytes), report


class _CheckPage:
    """Chooses and reads the values of a page whose map is filled."""

    def __init__(self, trace: Trace, report: Report, cells: CheckCells, wish: PageWish) -> None:
        self._trace, self._report, self._cells, self._wish = trace, report, cells, wish

    def chosen(self, limit: float) -> ValueChoice:
        """Return whose values the page holds, where so many entries fit."""
        if self._wish.is_narrow:
            return self._wished()
        return self._cells.chosen(self._report, limit)

    def _wished(self) -> ValueChoice:
        cells, wish = self._cells, self._wish
        paths = cells.rows.paths
        rows = frozenset(n for n, path in enumerate(paths) if glob_matches(wish.path, path))
        if not rows:
            raise nothing_matched("--path", wish.path, paths)
        steps = [
            number
            for number, step in enumerate(cells.steps.all)
            if not wish.steps or (not step.is_setup and any(step.number in w for w in wish.steps))
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
        columns = as_arrays(trace.columns())
        for number, step in enumerate((*trace.setup, *trace.steps)):
            if number in choice.rows_of:
                view = step_view_of(step, columns)
                details.add(number, view, cells.held[number], choice.rows_of[number])
        return details.calls
