"""Reports and findings as JSON data (docs/commands/check.md), and read from such data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final

from rankscope.record.call import Mode
from rankscope.record.finding import Finding, Kind, Report, Severity, Skipped, Verdict
from rankscope.record.phases import Phase

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
