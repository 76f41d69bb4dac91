"""A model marked as Megatron marks it is judged as completely as with a layout file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import RankPool
from tests.lab.faults.expected import score
from tests.lab.faults.markedrows import BY_NAME, TABLE
from tests.lab.faults.runs import Run, proved, report_of
from tests.lab.faults.setup import Setup

CASES = ("tensor", "norms", "sequence", "forgotten")


def skipped(report: Mapping[str, Any]) -> int:
    return sum(each["count"] for each in report["skipped"] if each["reason"] == "layout unknown")


def origins(report: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return {
        (f["kind"], f["phase"], f["step"], f["path"], f["slot"], tuple(f["ranks"]))
        for f in report["findings"]
        if f["origin"]
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_marks_serve_as_well_as_a_layout_file(
    ranks: RankPool, tmp_path: Path, case: str, world: int
) -> None:
    for is_faulty in (False, True):
        setup = Setup(ranks=world, is_faulty=is_faulty)
        reports = {}
        for way in ("marked", "declared"):
            run = Run(name=f"{case}-{way}", setup=setup, table=TABLE)
            report = report_of(ranks, run, tmp_path / f"{way}-{is_faulty}")
            expected = BY_NAME[run.name].expected(setup)
            found = score(report, expected if is_faulty else None)
            assert found.false_alarms == 0, f"{run.label}: {found.said}"
            assert found.detected and found.module and found.ranks and found.kind, found.said
            reports[way] = report
        marked, declared = reports["marked"], reports["declared"]
        assert origins(marked) == origins(declared)
        assert (marked["compared"], marked["recorded"]) == (
            declared["compared"],
            declared["recorded"],
        )
        assert skipped(marked) <= skipped(declared)


@pytest.mark.parametrize("case", CASES)
def test_the_marked_programs_are_wrong_with_their_fault_and_right_without(
    ranks: RankPool, tmp_path: Path, case: str
) -> None:
    for is_faulty in (False, True):
        run = Run(name=f"{case}-marked", setup=Setup(ranks=4, is_faulty=is_faulty), table=TABLE)
        assert bool(proved(ranks, run, tmp_path)) == is_faulty
