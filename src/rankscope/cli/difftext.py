"""What `diff` found as text.

The first five lines are the answer: the verdict, what differed before any number was computed, and
the first wrong place. Then which traces these were, all origins, and what could not be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rankscope.cli.checktext import STYLES, left_out_lines, listed_findings, painted_verdict
from rankscope.cli.terminal import Paint
from rankscope.diagnosis.comparison.bitwise import BitwiseReport
from rankscope.diagnosis.finalreport import report_json
from rankscope.diagnosis.verdictwords import infected_line, where_line
from rankscope.record.finding import Report, Verdict
from rankscope.record.ranklists import ranks_text
from rankscope.tree.summary import counted, extent
from rankscope.tree.views import Trace

__all__ = ["bitwise_json", "bitwise_lines", "difference_lines", "matrix_lines"]

_MOST_REASONS = 3


def difference_lines(
    ref: Trace, test: Trace, report: Report, paint: Paint, *, is_all: bool = False
) -> Iterator[str]:
    """Yield the lines of a report of `diff`."""
    yield painted_verdict(report, paint)
    by_answer: dict[bool | None, list[str]] = {False: [], None: [], True: []}
    for _, is_same, text in report.preflight:
        by_answer[is_same].append(text)
    other, same = by_answer[False], by_answer[True]
    if other:
        yield f"  before any number: {paint('bold', '; '.join(other))}"
    elif same:
        yield f"  before any number: {'; '.join(same)}"
    for first in report.origins[:1]:
        yield f"  first: {paint('bold', first.message)}"
        yield f"  where: {where_line(first)}"
        yield f"  look at: {first.advice}"
        yield f"  infected: {infected_line(first)}"
    yield paint("dim", f"REF   {ref.path}  {extent(ref.run)}, {ref.state}")
    yield paint("dim", f"TEST  {test.path}  {extent(test.run)}, {test.state}")
    yield from listed_findings(report, is_all=is_all, paint=paint)
    yield ""
    yield from (f"the same: {text}" for text in same if other)
    yield from (f"not told: {text}" for text in by_answer[None])
    yield from left_out_lines(report, "not compared")


def bitwise_lines(found: BitwiseReport, paint: Paint) -> Iterator[str]:
    """Yield the five lines of `diff --exact`."""
    report, first = found.report, found.first
    start = paint(STYLES[report.verdict], report.verdict.value)
    equal = f"{found.equal:,} of {counted(report.compared, 'value')} are bitwise equal"
    yield f"{start}: {f'{report.lacks}; ' if report.lacks else ''}{equal}"
    if first is None:
        yield "  first: none differs"
        yield "  where: nowhere"
    else:
        before = counted(found.equal_before, "value")
        yield f"  first: {paint('bold', first.message)} ({before} before it equal)"
        yield f"  where: {where_line(first)}"
    phases = [f"{p.word} {equal:,} of {total:,}" for p, (equal, total) in found.by_phase.items()]
    yield f"  equal by phase: {', '.join(phases) or 'none was compared'}"
    reasons = [f"{each.count:,}: {each.reason}" for each in report.skipped[:_MOST_REASONS]]
    if len(report.skipped) > _MOST_REASONS:
        reasons.append("...")
    if report.unpaired:
        reasons.append(f"{report.unpaired:,}: in one trace alone")
    yield f"  not comparable: {'; '.join(reasons) or 'none'}"


def bitwise_json(found: BitwiseReport) -> dict[str, Any]:
    """Return the report of `diff --exact` as JSON data: that of `diff`, and what is equal."""
    phases = {
        phase.word: {"equal": equal, "compared": total}
        for phase, (equal, total) in found.by_phase.items()
    }
    counts = {"equal": found.equal, "equal_before": found.equal_before, "by_phase": phases}
    return {**report_json(found.report), "exact": counts}


def matrix_lines(ref: Path, found: Sequence[tuple[Path, Report]], paint: Paint) -> Iterator[str]:
    """Yield the table of `diff --matrix`: a row for each run."""
    head = ("run", "verdict", "compared", "kind", "ranks", "first")
    rows = [_matrix_row(path, report) for path, report in found]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    words = dict.fromkeys(report.verdict for _, report in found)
    told = ", ".join(
        f"{sum(report.verdict is word for _, report in found)} {word.value}" for word in words
    )
    yield f"{counted(len(found), 'run')} held to {ref}: {told}"
    yield paint("dim", _padded(head, widths))
    for row, (_, report) in zip(rows, found):
        start, verdict = row[0].ljust(widths[0]), row[1].ljust(widths[1])
        rest = _padded(row[2:], widths[2:])
        yield f"{start}  {paint(STYLES[report.verdict], verdict)}  {rest}"


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def _matrix_row(path: Path, report: Report) -> tuple[str, str, str, str, str, str]:
    compared = f"{report.compared:,} of {report.recorded:,}"
    if not report.origins:
        why = report.lacks or ("-" if report.verdict is Verdict.CLEAN else "records are missing")
        return str(path), report.verdict.value, compared, "-", "-", why
    first = report.origins[0]
    place = f"{first.path or '(root)'}{f':{first.slot}' if first.slot else ''}"
    when = f"{first.phase.word} of {first.mode.word} step {first.step}"
    more = len(report.origins) - 1
    others = f" and {counted(more, 'more origin')}" if more else ""
    ranks = ranks_text(first.ranks)
    return (
        str(path),
        report.verdict.value,
        compared,
        first.kind.value,
        ranks,
        f"{place}, {when}{others}",
    )
