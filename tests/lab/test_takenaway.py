"""Less evidence makes no fault: of the golden records of right programs."""

from __future__ import annotations

from tests.lab.golden import read_jobs, unpacked
from tests.lab.takenaway import PIECES, new_faults

BOARD = "tests"


def test_right_programs_raise_no_alarm_with_less_evidence() -> None:
    jobs = {n: job for n, job in read_jobs(BOARD).items() if "right_programs" in n}
    assert len(jobs) > 3
    with unpacked(BOARD, [*jobs.values()]) as records:
        alarms = {name: new_faults(records, [*PIECES], job) for name, job in jobs.items()}
    assert {name: lines for name, lines in alarms.items() if lines} == {}
