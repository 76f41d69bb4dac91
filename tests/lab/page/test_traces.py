"""A large trace made for pages."""

from __future__ import annotations

from pathlib import Path

from rankscope.diagnosis.check import check
from rankscope.record.finding import Verdict
from rankscope.tree.reader import open_trace
from tests.lab.page.bigtrace import big_trace


def test_a_small_sister_of_the_large_trace_has_one_origin(tmp_path: Path) -> None:
    report = check(open_trace(big_trace(tmp_path / "out", ranks=32, modules=60, steps=4)))
    assert (report.verdict, report.recorded) == (Verdict.FAULT, 240)
    (origin,) = report.origins
    assert (origin.step, origin.ranks) == (2, (10,)) and origin.victims > 100
