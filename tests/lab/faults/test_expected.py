"""Scoring, on reports written by hand: what counts as named, and what as a false alarm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.faults.board import lines, table
from tests.lab.faults.expected import Expected, score
from tests.lab.faults.runs import Outcome, Run
from tests.lab.faults.setup import Setup

EXPECTED = Expected(
    kinds=("replica-mismatch",),
    phases=("grads",),
    places=(("layers.*.norm", "grad:weight"),),
    ranks=(1,),
    step=0,
)


def finding(**other: Any) -> dict[str, Any]:
    said = {
        "kind": "replica-mismatch",
        "phase": "grads",
        "step": 0,
        "micro_batch": None,
        "path": "layers.1.norm",
        "slot": "grad:weight",
        "ranks": [1],
        "origin": True,
        "severity": "fault",
        "evidence": {},
        "message": "",
    }
    return {**said, **other}


def report(*findings: dict[str, Any], verdict: str = "fault") -> dict[str, Any]:
    return {"verdict": verdict, "findings": list(findings)}


def test_an_origin_with_the_right_place_ranks_and_kind_scores_everything() -> None:
    found = score(report(finding()), EXPECTED)
    assert found.detected and found.module and found.ranks and found.kind
    assert found.false_alarms == 0


@pytest.mark.parametrize(
    ("other", "lost"),
    [
        ({"path": "layers.1.head"}, {"module", "ranks", "kind"}),
        ({"slot": "param:weight"}, {"module", "ranks", "kind"}),
        ({"phase": "params"}, {"module", "ranks", "kind"}),
        ({"step": 1}, {"module", "ranks", "kind"}),
        ({"ranks": [0, 1]}, {"ranks"}),
        ({"kind": "gradient-not-reduced"}, {"kind"}),
    ],
)
def test_what_is_named_otherwise_is_not_named(other: dict[str, Any], lost: set[str]) -> None:
    found = score(report(finding(**other)), EXPECTED)
    assert found.detected
    assert {n for n in ("module", "ranks", "kind") if not getattr(found, n)} == lost
    assert found.false_alarms == (1 if "module" in lost else 0)


def test_victims_are_no_false_alarms_and_other_origins_are() -> None:
    victim = finding(path="head", origin=False)
    assert score(report(finding(), victim), EXPECTED).false_alarms == 0
    other = finding(path="head")
    found = score(report(finding(), other), EXPECTED)
    assert found.module and found.false_alarms == 1


def test_a_victim_at_the_right_place_does_not_name_it() -> None:
    found = score(report(finding(path="head"), finding(origin=False)), EXPECTED)
    assert not found.module and found.false_alarms == 1


def test_warnings_are_neither_faults_nor_alarms() -> None:
    warning = finding(severity="warning")
    assert score(report(warning, verdict="clean"), None).detected
    assert not score(report(warning, verdict="clean"), EXPECTED).module


def test_what_is_expected_as_a_warning_is_found_in_a_clean_report_and_faults_beside_it_alarm() -> (
    None
):
    mild = replace(EXPECTED, severity="warning")
    warning = finding(severity="warning", origin=False)
    found = score(report(warning, verdict="clean"), mild)
    assert found.detected and found.module and found.ranks and found.kind
    assert score(report(warning, finding(path="head")), mild).false_alarms == 1
    assert not score(report(verdict="clean"), mild).detected


def test_a_program_that_is_right_has_to_be_called_clean() -> None:
    assert score(report(verdict="clean"), None).detected
    assert not score(report(verdict="incomplete"), None).detected
    found = score(report(finding(), finding(origin=False)), None)
    assert not found.detected and found.false_alarms == 2


def test_where_all_parameters_are_meant_every_one_has_to_be_named() -> None:
    both = Expected(
        kinds=("replica-mismatch",),
        phases=("grads",),
        places=(("layers.*", "grad:*"),),
        all_of=(("layers.0.norm", "grad:weight"), ("layers.1.norm", "grad:weight")),
        ranks=(1,),
    )
    assert not score(report(finding()), both).module
    assert score(report(finding(), finding(path="layers.0.norm")), both).module
    inside = finding(evidence={"parameters": ["layers.0.norm.weight"]})
    assert score(report(inside), both).module


def test_what_the_evidence_must_say_is_looked_for_in_evidence_and_message() -> None:
    told = Expected(
        kinds=("group-mismatch",),
        phases=("collective",),
        places=(("*", "collective.*"),),
        ranks=(0, 1),
        evidence=("[0, 2]",),
    )
    said = {
        "kind": "group-mismatch",
        "phase": "collective",
        "slot": "collective.0",
        "ranks": [0, 1],
    }
    assert not score(report(finding(**said)), told).kind
    assert score(report(finding(**said, evidence={"members": {"0": [0, 2]}})), told).kind
    assert score(report(finding(**said, message="rank 0 means [0, 2]")), told).kind


def test_the_table_adds_runs_up_by_program() -> None:
    good, missed = score(report(finding()), EXPECTED), score(report(verdict="clean"), EXPECTED)
    runs = [Run(name="ddp-bypassed", setup=Setup(seed=n, is_faulty=True)) for n in range(2)]
    outcomes = [Outcome(run=r, score=s, seconds=1.0) for r, s in zip(runs, (good, missed))]
    silent = Run(name="ddp", setup=Setup())
    clean = score(report(verdict="clean"), None)
    outcomes.append(Outcome(run=silent, score=clean, seconds=1.0))
    text = table(lines(outcomes))
    assert "wrapper | 2 | 2 | 1 | 1 | 1 | 1 | 0 |" in text
    assert "| ddp | replicas on different rows | 2 | 1 | 1 | 0 |" in text
