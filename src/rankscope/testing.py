"""For people's own test suites: a run must be the same as a golden one that is kept beside the
tests.

    with rankscope.trace(out=tmp_path / "now", steps="all"):
        train()
    rankscope.testing.assert_same("tests/golden", tmp_path / "now")
"""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Report, Verdict
from rankscope.tree.reader import TraceLike

__all__ = ["assert_same"]

_MOST = 5


def assert_same(ref: TraceLike, test: TraceLike, *, paths: Sequence[str] = ()) -> None:
    """Fail where a run differs from a reference, as `rankscope diff` says it.

    Args:
        ref: the golden trace: open, its folder, or what `with rankscope.trace(...)` gave.
        test: the trace of the run in question.
        paths: rules `regex=replacement` that make its paths those of the reference.

    Raises:
        AssertionError: a difference, or nothing that could be compared; says where it begins.
        FolderError, TraceError: a folder that holds no trace, or a damaged one.
        SettingError: a rule for paths is none.
    """
    report = diff(ref, test, paths=paths)
    if report.verdict is not Verdict.CLEAN:
        raise AssertionError("\n".join(_lines(report)))


def _lines(report: Report) -> list[str]:
    judged = f"{report.compared} of {report.recorded} values compared"
    lines = [f"{report.verdict.value}: {report.lacks or judged}"]
    other = (text for _, is_same, text in report.preflight if is_same is False)
    lines += [f"before any number: {text}" for text in other]
    for finding in report.origins[:_MOST]:
        lines.append(f"{finding.kind.value}: {finding.message} ({finding.victims} values follow)")
    return lines
