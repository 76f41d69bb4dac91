"""A finding, and the report of `check` or `diff`, in words and as JSON data
(docs/commands/check.md), and read from such data."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rankscope.record.call import Mode
from rankscope.record.finding import Finding, Kind, Report, Severity, Skipped, Verdict
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.texts import counted, visible

Style = Callable[[str, str], str]
"""Puts a style (`bold`, `dim`, a colour) around a text."""
STYLES: Final = {Verdict.CLEAN: "green", Verdict.FAULT: "red", Verdict.INCOMPLETE: "yellow"}
_LONGEST: Final = 2_000
"""Characters of a text that a tracker is handed; MLflow takes no more than 5,000 in a tag."""
_MOST: Final = 5
"""Findings of one kind and event that are listed one by one."""
_MOST_REASONS: Final = 3
_ONLY_DIFF: Final = "what all ranks do alike only diff can see"
_OF_FACTORS: Final = ("relative_error", "range")
"""Evidence that says with less accuracy what a factor says."""
_RANK_LISTS: Final = ("missing", "ranks", "members")
"""Evidence that is lists of ranks."""


def when_text(finding: Finding) -> str:
    """Return `forward of train step 3`."""
    joint = ", before" if finding.phase is Phase.SETUP else " of"
    return f"{finding.phase.word}{joint} {finding.mode.word} step {finding.step}"


def where_line(finding: Finding) -> str:
    """Return path, slot, ranks and step."""
    micro = "" if finding.micro_batch is None else f", micro-batch {finding.micro_batch}"
    return (
        f"{finding.path or '(root)'}  {finding.slot or ''}  {ranks_named(finding.ranks)}, "
        f"{when_text(finding)}{micro}"
    )


def infected_line(finding: Finding) -> str:
    """Return how many values are wrong because of a finding, and the first of them."""
    if not finding.victims:
        return "no other value that was judged; what was not judged may be"
    names = ", ".join(n for n in finding.victim_names if n != finding.place)  # in later steps
    more = ", ..." if finding.victims > len(finding.victim_names) else ""
    return f"{counted(finding.victims, 'value')}{f': {names}{more}' if names else ''}"


def answer_parts(first: Finding) -> dict[str, str]:
    """Return what there is to know of the first finding, by its title."""
    return {
        "warning" if first.severity is Severity.WARNING else "first": first.message,
        "where": where_line(first),
        "infected": infected_line(first),
        "look at": first.advice,
    }


def answer_lines(report: Report, *titles: str) -> Iterator[str]:
    """Yield a line for each of these titles of `answer_parts`, if there is an origin."""
    for first in report.origins[:1]:
        parts = answer_parts(first)
        yield from (f"{title}: {visible(parts[title])}" for title in titles)


def notice_line(findings: Sequence[Finding]) -> str:
    """Return the line on findings of one kind on the same ranks, made while the job runs."""
    first, *more_findings = findings
    place = visible(" ".join(filter(None, (first.path or "(root)", first.slot))))
    more = f" and {len(more_findings)} more" if more_findings else ""
    return (
        f"{first.mode.word} step {first.step}: {first.kind.value} at {place}{more}, "
        f"{ranks_named(first.ranks)}"
    )


def evidence_parts(
    evidence: Mapping[str, Any],
) -> Iterator[tuple[str, str | Sequence[Mapping[str, Any]]]]:
    """Yield what a finding rests on by name, as text or as the rows of a table: numbers that belong
    beside each other first, in one table."""
    pairs = {name: value for name, value in evidence.items() if isinstance(value, Mapping)}
    if pairs:
        yield "side by side", [{"": name, **value} for name, value in pairs.items()]
    hidden = _OF_FACTORS if "factor" in evidence else ()
    for name, value in evidence.items():
        if name in hidden:
            continue
        if name == "rank_resolution":
            yield "wrong rank", "cannot be told from the records"
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield name.replace("_", " "), value
        elif name not in pairs and value not in (None, [], ""):
            is_ranks = name in _RANK_LISTS and _kinds(value) == {int}
            yield name.replace("_", " "), ranks_named(value) if is_ranks else cell_text(value)


def cell_text(value: Any) -> str:
    """Return one value of evidence; a list of whole numbers is one of ranks or steps."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if (kinds := _kinds(value)) == {int}:
        return ranks_text(value)
    if kinds == {str}:
        return ", ".join(entry or "(root)" for entry in value)
    if kinds == {float}:
        return " to ".join(f"{entry:.6g}" for entry in value)
    return value if isinstance(value, str) else json.dumps(value)


def _kinds(value: Any) -> set[type]:
    return set(map(type, value)) if isinstance(value, list) else set()


def _unpainted(style: str, text: str) -> str:
    return text


def verdict_line(report: Report, paint: Style = _unpainted) -> str:
    """Return the first line of a report: the verdict, and what stands behind it."""
    return f"{paint(STYLES[report.verdict], verdict_word(report))}{verdict_rest(report)}"


def verdict_word(report: Report) -> str:
    """Return how the line of the verdict begins: it promises no clean job, for what was held to
    nothing may be wrong."""
    if report.verdict is not Verdict.CLEAN:
        return str(report.verdict.value)
    return "no fault so far, the job goes on" if report.is_live else "no fault found"


def verdict_rest(report: Report) -> str:
    """Return what stands behind the word of the verdict in its line: what is wrong or lacks, how
    much was held to what, warnings."""
    of_recorded = f"of {counted(report.recorded, 'value')}"
    warnings = dict.fromkeys(warning.kind.value for warning in report.warnings)
    warned = f"; {counted(len(report.warnings), 'warning')}: {', '.join(warnings)}" * bool(warnings)
    if report.command == "diff":
        amount = f"{report.judged:,} {of_recorded} compared"
        if report.unpaired:
            amount += f"; {counted(report.unpaired, 'is', 'are')} in one trace alone"
    else:
        amount = (
            f"{report.held_to_others:,} {of_recorded} held to another rank or run, "
            f"{report.held_to_finite_only:,} only to NaN and infinity"
        )
        if report.undeclared:
            amount += f"; {_undeclared(report)}{'' if report.layout else ': rankscope layout'}"
        if report.verdict is Verdict.CLEAN:
            return f": {amount}{warned}; {_ONLY_DIFF}"
    return f"{_wrong_or_lacking(report)} ({amount}{warned})"


def _wrong_or_lacking(report: Report) -> str:
    if report.origins:
        kinds = ", ".join(dict.fromkeys(f.kind.value for f in report.origins))
        return f": {kinds}, {counted(len(report.origins), 'origin')}"
    is_difference = report.command == "diff"
    if report.lacks:
        is_any = is_difference or report.judged
        return f": {report.lacks}" if is_any else f": nothing was judged: {report.lacks}"
    if report.verdict is not Verdict.INCOMPLETE:
        return ""
    if report.is_live:
        return ": no fault so far; the job goes on"
    noun = "difference" if is_difference else "fault"
    return f": no {noun} in what is here, but records are missing (rankscope verify)"


def _undeclared(report: Report) -> str:
    """Return how many values lie in a layout that nothing describes, and which, or the first:
    what nobody described may be what is wrong."""
    lacking = f"that {report.layout} does not describe" if report.layout else "nobody declared"
    names = f" ({report.undeclared_names})" if report.undeclared_names else ""
    return f"{counted(report.undeclared, 'lies', 'lie')} in a layout {lacking}{names}"


def coverage_line(report: Report, required: float) -> str:
    """Return why a clean verdict is not enough for `--require-coverage`, and what to do."""
    how = "held to another rank or run"
    advice = (
        "trace with --rs-digest full, --rs-phases all and without --rs-paths; what one rank alone "
        "holds can be held to another run with rankscope diff"
    )
    if report.command == "diff":
        how, advice = "compared", "trace both runs with the same options, and say with --map and "
        advice += "--layout what their names do not"
    elif report.undeclared:
        file = "write a proposal with `rankscope layout TRACE --out layout.toml`, look it over"
        if report.layout:
            file = "add [[layout]] entries for them to that file (docs/commands/tensor.md)"
        advice = f"{_undeclared(report)}: {file}, and give it with --layout"
    amount = f"{report.held_to_others:,} of {counted(report.recorded, 'value was', 'values were')}"
    covered = f"{amount} {how} ({report.coverage:.1%})"
    return f"{covered}, --require-coverage asks for {required:.1%}: {advice}"


def different_before(report: Report) -> str:
    """Return in what two runs differ apart from numbers; "" for nothing."""
    return "; ".join(text for _, is_same, text in report.preflight if is_same is False)


def report_lines(
    report: Report, traces: Sequence[str], paint: Style = _unpainted, *, is_all: bool = False
) -> Iterator[str]:
    """Yield the lines of a report, the first five of them the answer, of hashes all lines.
    `traces`: a line for each trace of the report; `is_all`: list every finding."""
    if report.equal is not None:
        yield from _equality_lines(report, report.equal, paint)
        return
    yield verdict_line(report, paint)
    agreements = [text for _, is_same, text in report.preflight if is_same]
    differences = different_before(report)
    if differences or agreements:
        yield (
            f"  runs differ: {paint('bold', differences)}"
            if differences
            else f"  both runs: {'; '.join(agreements)}"
        )
    for first in report.origins[:1]:
        parts = answer_parts(first)
        parts["first"] = paint("bold", parts["first"])
        yield from (f"  {title}: {text}" for title, text in parts.items())
    yield from (paint("dim", line) for line in traces)
    yield from _listed("origins", report.origins, paint, is_all=is_all)
    yield from _listed("warnings", report.warnings, paint, is_all=is_all)
    if is_all and report.command == "check":
        yield from _listed("victims", report.victims, paint, is_all=True)
    lines = [f"the same: {text}" for text in agreements if differences]
    unknown = dict.fromkeys(text for _, is_same, text in report.preflight if is_same is None)
    lines += [f"not known: {text}" for text in unknown]
    between = " between ranks" if report.command == "check" else ""
    for skipped in report.skipped:
        values = counted(skipped.count, "value")
        lines.append(f"not compared{between}: {values}: {skipped.reason}")
    lines += [f"note: {note}" for note in report.notes]
    yield from ["", *lines] if lines else ()


def _listed(
    title: str, findings: Sequence[Finding], paint: Style, *, is_all: bool
) -> Iterator[str]:
    """Yield findings, those of one kind and step together."""
    if not findings:
        return
    yield ""
    yield paint("bold", title)
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.kind, finding.phase, finding.mode, finding.step, finding.micro_batch)
        groups.setdefault(key, []).append(finding)
    for group in groups.values():
        listed = group if is_all else group[:_MOST]
        for finding in listed:
            yield f"  {finding.kind.value}  {where_line(finding)}"
            yield f"    {finding.message}"
            if finding.is_origin and finding is group[0]:
                for name, part in evidence_parts(finding.evidence):
                    rows = [{"": part}] if isinstance(part, str) else part
                    for row in rows:
                        cells = (f"{key} {cell_text(value)}" for key, value in row.items())
                        yield f"    {name}: {'  '.join(map(str.lstrip, cells))}"
                if finding.victims:
                    yield f"    infected: {infected_line(finding)}"
        if len(group) > len(listed):
            yield f"  ... and {len(group) - len(listed)} more of that kind in that step (--all)"


def _equality_lines(
    report: Report, equal: Mapping[Phase, tuple[int, int]], paint: Style
) -> Iterator[str]:
    problem = f"{report.lacks}; " if report.lacks else ""
    compared = counted(report.compared, "value is", "values are")
    verdict = paint(STYLES[report.verdict], report.verdict.value)
    total = sum(count for count, _ in equal.values())
    yield f"{verdict}: {problem}{total:,} of {compared} bitwise equal"
    for first in report.findings:
        before = counted(first.evidence["equal_before"], "value")
        yield f"  first: {paint('bold', first.message)} ({before} before it equal)"
        yield f"  where: {where_line(first)}"
    if not report.findings:
        yield "  first: none differs"
        yield "  where: nowhere"
    phases = [f"{phase.word} {count:,} of {total:,}" for phase, (count, total) in equal.items()]
    yield f"  equal by phase: {', '.join(phases) or 'none was compared'}"
    skipped = sorted(report.skipped, key=lambda skip: -skip.count)
    reasons = [f"{skip.count:,}: {skip.reason}" for skip in skipped[:_MOST_REASONS]]
    reasons += ["..."] if len(skipped) > _MOST_REASONS else []
    if report.unpaired:
        reasons.append(f"{report.unpaired:,}: in one trace alone")
    yield f"  not comparable: {'; '.join(reasons) or 'none'}"


def assertion_lines(report: Report) -> Iterator[str]:
    """Yield what a test that fails says."""
    yield verdict_line(report)
    if differences := different_before(report):
        yield f"runs differ: {differences}"
    for finding in report.origins[:_MOST]:
        after = counted(finding.victims, "value follows", "values follow")
        yield f"{finding.kind.value}: {finding.message} ({after})"


def matrix_lines(
    ref: str, reports: Sequence[tuple[str, Report]], paint: Style = _unpainted
) -> Iterator[str]:
    """Yield a table of the reports on several runs, each with the name of its run."""
    rows = [("run", "verdict", "compared", "kind", "ranks", "first")]
    rows += [_matrix_row(run, report) for run, report in reports]
    counts = Counter(report.verdict.value for _, report in reports)
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    yield f"{counted(len(reports), 'run')} compared with {ref}: {words}"
    widths = [max(map(len, column)) for column in zip(*rows)]
    head, *padded = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]
    yield paint("dim", "  ".join(head).rstrip())
    for row, (_, report) in zip(padded, reports):
        row[1] = paint(STYLES[report.verdict], row[1])
        yield "  ".join(row).rstrip()


def _matrix_row(run: str, report: Report) -> tuple[str, str, str, str, str, str]:
    begin = (run, report.verdict.value, f"{report.compared:,} of {report.recorded:,}")
    if not report.origins:
        why = "-" if report.verdict is Verdict.CLEAN else "records are missing"
        return (*begin, "-", "-", report.lacks or why)
    first, *more_origins = report.origins
    more = f" and {counted(len(more_origins), 'more origin')}" if more_origins else ""
    where = f"{first.place}, {when_text(first)}{more}"
    return (*begin, first.kind.value, ranks_text(first.ranks), where)


def tracker_fields(report: Report, trace: str) -> dict[str, str | int | float]:
    """Return what an experiment tracker is told, by name; `trace` is the trace folder."""
    fields: dict[str, str | int | float] = {
        "verdict": report.verdict.value,
        "summary": visible(verdict_line(report))[:_LONGEST],
        "findings": len(report.findings),
        "coverage": round(report.coverage, 4),
        "trace": visible(trace),
    }
    for first in report.origins[:1]:
        fields["first_finding"] = visible(first.message)[:_LONGEST]
        fields["first_where"] = visible(where_line(first))[:_LONGEST]
    return fields


# ---- as JSON data --------------------------------------------------------------------------------

_Readers = Mapping[str, Callable[[Any], Any]]
_FINDING: Final[_Readers] = {
    "kind": Kind,
    "phase": {phase.word: phase for phase in Phase}.__getitem__,
    "step": int,
    "micro_batch": lambda number: None if number is None else int(number),
    "path": str,
    "slot": str,
    "ranks": lambda ranks: tuple(map(int, ranks)),
    "is_origin": bool,
    "severity": Severity,
    "mode": {mode.word: mode for mode in Mode}.__getitem__,
    "victims": int,
    "evidence": dict,
    "message": str,
    "advice": str,
}
"""What is written of a finding, and how it is read; `is_origin` is `origin` there. The names of
victims are not written."""
_REPORT: Final[_Readers] = {
    "verdict": Verdict,
    "preflight": lambda lines: tuple((each["what"], each["same"], each["text"]) for each in lines),
    "unpaired": int,
    "judged": int,
    "compared": int,
    "held_to_others": int,
    "held_to_finite_only": int,
    "skipped": lambda skipped: tuple(Skipped(**each) for each in skipped),
    "recorded": int,
    "alone": int,
    "undeclared": int,
    "lacks": str,
    "layout": str,
    "is_live": bool,
    "notes": tuple,
    "findings": lambda findings: tuple(map(finding_of, findings)),
}
"""The same of a report."""
_DERIVED: Final = ("judged", "held_to_others", "held_to_finite_only")
"""Written, and not read: they follow from others."""


def report_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON data; what was looked at before any number stands in that of `diff`
    alone, how much is bitwise equal where hashes were compared."""
    data = {name: _plain(getattr(report, name)) for name in _REPORT}
    data["preflight"] = [
        {"what": w, "same": is_same, "text": t} for w, is_same, t in report.preflight
    ]
    data["skipped"] = [{"reason": skip.reason, "count": skip.count} for skip in report.skipped]
    data["findings"] = [finding_json(finding) for finding in report.findings]
    left_out = () if report.preflight else ("preflight", "unpaired")
    exact = {} if report.equal is None else {"exact": _equal_counts(report, report.equal)}
    return {**{name: data[name] for name in data if name not in left_out}, **exact}


def _equal_counts(report: Report, equal: Mapping[Phase, tuple[int, int]]) -> dict[str, Any]:
    count = sum(equal_count for equal_count, _ in equal.values())
    before = [finding.evidence["equal_before"] for finding in report.findings]
    phases = {phase.word: {"equal": n, "compared": total} for phase, (n, total) in equal.items()}
    return {"equal": count, "equal_before": min(before, default=count), "by_phase": phases}


def report_of(command: str, data: Mapping[str, Any]) -> Report:
    """Return the report of `report_json`, but for what is bitwise equal; KeyError, TypeError,
    ValueError for other data."""
    full_data = {"preflight": (), "unpaired": 0, **data}
    fields = {name: read(full_data[name]) for name, read in _REPORT.items() if name not in _DERIVED}
    return Report(command=command, **fields)


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return one finding as JSON data."""
    return {name.removeprefix("is_"): _plain(getattr(finding, name)) for name in _FINDING}


def finding_of(data: Mapping[str, Any]) -> Finding:
    """Return the finding of `finding_json`, or of a line of findings.jsonl; KeyError, TypeError,
    ValueError for other data."""
    return Finding(
        **{name: read(data[name.removeprefix("is_")]) for name, read in _FINDING.items()}
    )


def _plain(value: Any) -> Any:
    """Return an enum's word, a list for a tuple, a dict for a map, and other values as they are."""
    if isinstance(value, enum.Enum):
        return getattr(value, "word", value.value)
    if isinstance(value, Mapping):
        return dict(value)
    return [*value] if isinstance(value, tuple) else value
