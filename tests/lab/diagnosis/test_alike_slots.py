"""Slots that lie alike are composed together: how many at a time changes no report."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.diagnosis.causes import _MOST_TOLD
from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.tree import step
from tests.lab.perf.check import made_trace, spoil


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A flat model on two by eight ranks: as it is, with one faulty rank, and all ranks unlike."""
    folder = tmp_path_factory.mktemp("alike")
    made = {name: made_trace(folder / name, 16, 120, 3) for name in ("right", "faulty")}
    spoil(made["faulty"], 5)
    made["unlike"] = made_trace(folder / "unlike", 16, 120, 3, are_replicas=False)
    return made


@pytest.mark.parametrize("test", ["right", "faulty", "unlike"])
@pytest.mark.parametrize("ref", ["right", "unlike"])
def test_diff_says_the_same_however_many_slots_are_composed_at_once(
    traces: dict[str, Path], ref: str, test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = diff(traces[ref], traces[test])
    for most_rows in (1, 100):
        monkeypatch.setattr(step, "_MOST_ROWS", most_rows)
        assert diff(traces[ref], traces[test]) == together


def test_of_hundreds_of_victims_the_first_have_evidence(traces: dict[str, Path]) -> None:
    report = check(traces["unlike"])
    victims = [finding for finding in report.findings if not finding.is_origin]
    bare = [finding for finding in victims if not finding.evidence]
    assert len(victims) > _MOST_TOLD
    assert bare == victims[-len(bare) :]
    assert len(victims) - len(bare) >= _MOST_TOLD
    assert all(finding.evidence for finding in report.origins)
