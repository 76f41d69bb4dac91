"""A report as text: the answer in the first lines, then what it rests on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rankscope.cli.terminal import Paint
from rankscope.diagnosis.verdictwords import infected_line, lying_words, verdict_rest, where_line
from rankscope.record.finding import Finding, Report, Verdict
from rankscope.tree.summary import counted, extent
from rankscope.tree.views import Trace

_MOST = 5
"""Findings of one kind and event that are listed one by one."""
STYLES = {Verdict.CLEAN: "green", Verdict.FAULT: "red", Verdict.INCOMPLETE: "yellow"}


def report_lines(
    trace: Trace, report: Report, paint: Paint, *, is_all: bool = False, layout: str = ""
) -> Iterator[str]:
    """Yield the lines of a report; `layout` is the layout file that it rests on, "" for none."""
    yield painted_verdict(report, paint, layout, is_live=trace.is_live)
    yield from first_lines(report, paint)
    yield paint("dim", f"{trace.path}  {extent(trace.run)}, {trace.state}")
    yield from listed_findings(report, is_all=is_all, paint=paint)
    if is_all:
        yield from _listed("victims", report.victims, is_all=True, paint=paint)
    if report.skipped or report.notes:
        yield ""
    yield from left_out_lines(report, "not compared between ranks")


def first_lines(report: Report, paint: Paint) -> Iterator[str]:
    """Yield what the first origin is, where, what follows from it, and what to look at."""
    for first in report.origins[:1]:
        yield f"  first: {paint('bold', first.message)}"
        yield f"  where: {where_line(first)}"
        yield f"  infected: {infected_line(first)}"
        yield f"  look at: {first.advice}"


def coverage_line(report: Report, required: float, layout: str = "") -> str:
    """Return why a clean verdict is not enough for `--require-coverage`, and what to do; `layout`
    is the layout file that was given, "" for none."""
    line = (
        f"{report.judged:,} of {report.recorded:,} values were judged ({report.coverage:.1%}), "
        f"--require-coverage asks for {required:.1%}"
    )
    if report.undeclared and layout:
        more = ", ..." if report.undeclared > len(report.undeclared_names) else ""
        names = f"{', '.join(report.undeclared_names)}{more}"
        return (
            f"{line}: {lying_words(report)} that {layout} does not describe ({names}): add "
            "[[layout]] entries for them to that file (docs/commands/tensor.md), and give it "
            "with --layout"
        )
    if report.undeclared:
        return (
            f"{line}: {lying_words(report)} nobody declared: write a proposal with "
            f"`rankscope layout TRACE --out layout.toml`, look it over, and give it with --layout"
        )
    return f"{line}: trace with --rs-digest full, --rs-phases all and without --rs-paths"


def painted_verdict(
    report: Report, paint: Paint, layout: str = "", *, is_live: bool = False
) -> str:
    """Return the first line; `layout` as of `report_lines`, `is_live` as of `verdict_rest`."""
    rest = verdict_rest(report, layout, is_live=is_live)
    return f"{paint(STYLES[report.verdict], report.verdict.value)}{rest}"


def listed_findings(report: Report, *, is_all: bool, paint: Paint) -> Iterator[str]:
    """Yield the origins and the warnings of a report, those of one kind and step together."""
    yield from _listed("origins", report.origins, is_all=is_all, paint=paint)
    yield from _listed("warnings", report.warnings, is_all=is_all, paint=paint)


def _listed(
    title: str, findings: Sequence[Finding], *, is_all: bool, paint: Paint
) -> Iterator[str]:
    if not findings:
        return
    yield ""
    yield paint("bold", title)
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.kind, finding.phase, finding.mode, finding.step, finding.micro_batch)
        groups.setdefault(key, []).append(finding)
    for group in groups.values():
        shown = group if is_all else group[:_MOST]
        for finding in shown:
            yield f"  {finding.kind.value}  {where_line(finding)}"
            yield f"    {finding.message}"
            if finding.is_origin and finding is group[0]:
                yield from _evidence(finding)
        if len(group) > len(shown):
            yield f"  ... and {len(group) - len(shown)} more of that kind in that step (--all)"


def _evidence(finding: Finding) -> Iterator[str]:
    for name, value in finding.evidence.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for each in value:
                yield f"    {name}: {'  '.join(f'{key} {part}' for key, part in each.items())}"
        elif value not in (None, [], ""):
            yield f"    {name}: {value if isinstance(value, str) else json.dumps(value)}"
    if finding.victims:
        yield f"    infected: {infected_line(finding)}"


def left_out_lines(report: Report, words: str) -> Iterator[str]:
    """Yield why values were not compared, and what else must be known."""
    for skipped in report.skipped:
        yield f"{words}: {counted(skipped.count, 'value')}: {skipped.reason}"
    yield from (f"note: {note}" for note in report.notes)
