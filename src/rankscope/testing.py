"""For people's own test suites: a run must be the same as a golden one that is kept beside the
tests.

    with rankscope.trace(out=tmp_path / "now", steps="all"):
        train()
    rankscope.testing.assert_same("tests/golden", tmp_path / "now")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Union

from rankscope.diagnosis.comparison.diff import diff
from rankscope.record.finding import Report, Verdict
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace

__all__ = ["assert_same"]

_MOST = 5
TraceLike = Union[Trace, str, "os.PathLike[str]"]


def assert_same(ref: TraceLike, test: TraceLike, *, paths: Sequence[str] = ()) -> None:
    """Fail where a run differs from a reference, as `rankscope diff` says it.

    Args:
        ref: the golden trace, open or its folder.
        test: the trace of the run in question.
        paths: rules `regex=replacement` that make its paths those of the reference.

    Raises:
        AssertionError: a difference, or nothing that could be compared; says where it begins.
        FolderError, TraceError: a folder that holds no trace, or a damaged one.
        SettingError: a rule for paths is none.
    """
    report = diff(_opened(ref), _opened(test), paths=paths)
    if report.verdict is not Verdict.CLEAN:
        raise AssertionError("\n".join(_lines(report)))


def _opened(trace: TraceLike) -> Trace:
    return trace if isinstance(trace, Trace) else open_trace(trace)


def _lines(report: Report) -> list[str]:
    judged = f"{report.compared} of {report.recorded} values compared"
    lines = [f"{report.verdict.value}: {report.lacks or judged}"]
    lines += [f"before any number: {text}" for _, is_same, text in report.preflight if not is_same]
    for finding in report.origins[:_MOST]:
        lines.append(f"{finding.kind.value}: {finding.message} ({finding.victims} values follow)")
    return lines
