"""Verdicts and findings in words: what `check` and `diff` say in a terminal, in the page and
wherever else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Finding, Report, Verdict
from rankscope.record.ranklists import ranks_named
from rankscope.tree.summary import counted


def layout_named(run: Mapping[str, Any], given: LayoutFile | None = None) -> str:
    """Return the layout file that a verdict rests on: the one that was given now, else that of the
    job; "" for none.

    Args:
        run: header of the trace.
        given: the file, None for none.
    """
    return given.name if given else str(run.get("layout", {}).get("file", ""))


def verdict_rest(report: Report, layout: str = "", *, is_live: bool = False) -> str:
    """Return what stands behind the word of the verdict in its line: what is wrong or lacks, how
    much was judged, warnings.

    Args:
        report: of `check` or `diff`.
        layout: of `check`: the layout file that it rests on, "" for none.
        is_live: the job goes on, and its trace with it.
    """
    noun = "value" if report.recorded == 1 else "values"
    if report.command == "diff":
        judged = f"{report.compared:,} of {report.recorded:,} {noun} compared"
        if report.unpaired:
            verb = "is" if report.unpaired == 1 else "are"
            judged += f"; {report.unpaired:,} {verb} in one trace alone"
    else:
        judged = f"{report.judged:,} of {report.recorded:,} {noun} judged"
        alone = report.alone - report.undeclared
        if alone:
            judged += f", {alone:,} of them for NaN and infinity alone"
        if report.undeclared:
            lacking = f"that {layout} does not describe" if layout else "nobody declared"
            judged += f"; {lying_words(report)} {lacking}"
            judged += "" if layout else ": rankscope layout"
    return f"{_wrong_or_lacking(report, is_live=is_live)} ({judged}{_warnings(report)})"


def _wrong_or_lacking(report: Report, *, is_live: bool) -> str:
    if report.origins:
        kinds = ", ".join(dict.fromkeys(f.kind.value for f in report.origins))
        return f": {kinds}, {counted(len(report.origins), 'origin')}"
    is_difference = report.command == "diff"
    if report.lacks:
        is_any = is_difference or report.judged
        return f": {report.lacks}" if is_any else f": nothing was judged: {report.lacks}"
    if report.verdict is not Verdict.INCOMPLETE:
        return ""
    if is_live and not is_difference:
        return ": no fault so far; the job goes on"
    what = "difference" if is_difference else "fault"
    return f": no {what} in what is here, but records are missing (rankscope verify)"


def _warnings(report: Report) -> str:
    """Return how many warnings there are, and of which kinds."""
    kinds = [f.kind.value for f in report.warnings]
    if not kinds:
        return ""
    return f"; {counted(len(kinds), 'warning')}: {', '.join(dict.fromkeys(kinds))}"


def lying_words(report: Report) -> str:
    """Return how many values lie in a layout nobody declared, with the verb."""
    return f"{report.undeclared:,} {'lies' if report.undeclared == 1 else 'lie'} in a layout"


def where_line(finding: Finding) -> str:
    """Return path, slot, ranks and step of a finding."""
    micro = "" if finding.micro_batch is None else f", micro-batch {finding.micro_batch}"
    return (
        f"{finding.path or '(root)'}  {finding.slot or ''}  {ranks_named(finding.ranks)}, "
        f"{finding.phase.word} of {finding.mode.word} step {finding.step}{micro}"
    )


def infected_line(finding: Finding) -> str:
    """Return how many values are wrong because of a finding, and the first of them."""
    if not finding.victims:
        return "nothing else that was judged"
    names = ", ".join(finding.victim_names)
    more = ", ..." if finding.victims > len(finding.victim_names) else ""
    return f"{counted(finding.victims, 'value')}{f': {names}{more}' if names else ''}"
