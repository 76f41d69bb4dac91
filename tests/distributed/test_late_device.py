"""Ranks of an accelerator whose work is late: tracing never waits for it, and changes no bit."""

from __future__ import annotations

from pathlib import Path

from rankscope import open_trace
from rankscope.diagnosis.check import check
from rankscope.record.finding import Verdict
from tests.diagnosis.traced import traced_with_answers
from tests.distributed.pool import RankPool
from tests.lab.distributed import late_job as job


def test_tracing_makes_nobody_wait_changes_no_bit_and_is_complete(
    late_ranks: RankPool, tmp_path: Path
) -> None:
    out, answers = traced_with_answers(
        late_ranks, job.run, "ddp", "late", "", folder=tmp_path, world=2
    )
    for differing, waits, traced_waits in answers:
        assert differing == []
        assert [wait for wait in traced_waits if wait.is_of_rankscope] == []
        assert [wait.what for wait in traced_waits] == [wait.what for wait in waits]
    trace = open_trace(out)
    assert trace.is_complete and not [node.errors for node in trace.walk() if node.errors]
    report = check(trace)
    assert report.verdict is Verdict.CLEAN and report.compared > 0, report.findings
