"""For people's own test suites: a run must be the same as a golden one that is kept beside the
tests.

    with rankscope.trace(out=tmp_path / "now", steps="all"):
        train()
    rankscope.testing.assert_same("tests/train.golden", tmp_path / "now")

The golden file is written once, by `save_golden(trace, "tests/train.golden")`, and has a few KB.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rankscope.diagnosis.comparison.diff import diff
from rankscope.errors import FolderError, TraceError, os_errors_as
from rankscope.record.finding import Verdict
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.words.reports import assertion_lines

__all__ = ["assert_same", "save_golden"]


def assert_same(ref: TraceLike, test: TraceLike, *, paths: Sequence[str] = ()) -> None:
    """Fail where a run differs from a reference, as `rankscope diff` says it.

    Args:
        ref: the golden trace: its file, or any trace: open, its folder, or what
            `with rankscope.trace(...)` gave.
        test: the trace of the run in question.
        paths: rules `regex=replacement` that make its paths those of the reference.

    Raises:
        AssertionError: a difference, or nothing that could be compared; says where it begins.
        FolderError, TraceError: a folder that holds no trace, or a damaged one.
        SettingError: a rule for paths is not of that form.
    """
    report = diff(ref, test, paths=paths)
    if report.verdict is not Verdict.CLEAN:
        raise AssertionError("\n".join(assertion_lines(report)))


def save_golden(
    trace: TraceLike, file: str | os.PathLike[str], *, has_samples: bool = False
) -> int:
    """Write what `assert_same` and `rankscope diff` need of a trace into one small file, without
    times, hosts, arguments and tensors. Return its size in bytes.

    Args:
        trace: open, its folder, or what `with rankscope.trace(...)` gave; it has to be finished.
        file: where; one that is there is replaced.
        has_samples: keep the sketches of single samples of every value, for runs that split the
            batch over ranks or micro-batches in another way.

    Raises:
        TraceError: the trace is not complete, or damaged.
        FolderError: no trace is there, or the file cannot be written.
    """
    from rankscope.tree.goldenfile import write_golden

    with opened_trace(trace) as opened:
        if not opened.is_complete:
            raise TraceError(
                f"{opened.path}: a golden trace has to be complete; it is {opened.state}"
            )
        with os_errors_as(FolderError, f"{file}: cannot be written"):
            return write_golden(opened, Path(file), has_samples=has_samples)
