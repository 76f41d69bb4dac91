"""The tool itself: what a report says is true, and a report that says something else is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.words.reports import report_json
from tests.distributed.pool import RankPool
from tests.lab.claims.claim import Case
from tests.lab.claims.held import Held
from tests.lab.claims.recomputed import claims_in
from tests.lab.faults.runs import Run, reference_of, trace_of
from tests.lab.faults.setup import Setup, Shape

Wrong = Callable[[dict[str, Any]], None]
SETUP = Setup(
    shape=Shape(layers=2, hidden=8, context=4), ranks=2, is_faulty=True, keeps_tensors=True
)


def other_mean(report: dict[str, Any]) -> None:
    report["findings"][0]["evidence"]["values"][0]["mean"] += 1.0


def one_side(report: dict[str, Any]) -> None:
    report["findings"][0]["evidence"]["values"][0]["ranks"] = "0-1"


def another_sibling(report: dict[str, Any]) -> None:
    report["findings"][0]["evidence"]["siblings_that_agree"] = [report["findings"][0]["path"]]


def another_sentence(report: dict[str, Any]) -> None:
    first = report["findings"][0]
    there = "layers.0.attention.o_proj"
    first["message"] = first["message"].replace(there, first["path"])


def more_values(report: dict[str, Any]) -> None:
    report["recorded"] += 1


def other_distance(report: dict[str, Any]) -> None:
    report["findings"][0]["evidence"]["relative_error"] *= 20


def other_norm(report: dict[str, Any]) -> None:
    report["findings"][0]["evidence"]["l2"]["ref"] *= 2


def agreement(report: dict[str, Any]) -> None:
    first = report["findings"][0]
    first["evidence"]["agrees"] = f"{first['path']}:{first['slot']}"


def all_began_alike(report: dict[str, Any]) -> None:
    for line in report["preflight"]:
        if line["what"] == "start":
            line["text"] = "20 initial values agree"


@pytest.fixture(scope="module")
def cases(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """A report of `check`, and one of `diff`, each with the tensors behind it."""
    folder = tmp_path_factory.mktemp("claims")
    return {command: _case(ranks, command, folder) for command in ("check", "diff")}


def _case(ranks: RankPool, command: str, folder: Path) -> Case:
    if command == "check":
        run = Run(name="row-reduce-by-hand", setup=SETUP)
    else:
        run = Run(name="transposed-weight", setup=SETUP, table="tests.lab.faults.referencerows")
    trace = trace_of(ranks, run, folder / command)
    reference = reference_of(ranks, run, folder / "references")
    report = rankscope.diff(reference, trace) if reference else rankscope.check(trace)
    return Case(
        label=run.label,
        report=report_json(report),
        test=Held(rankscope.open_trace(trace)),
        ref=Held(rankscope.open_trace(reference)) if reference else None,
    )


@pytest.mark.parametrize("command", ["check", "diff"])
def test_what_a_report_says_is_true(cases: dict[str, Case], command: str) -> None:
    claims = [claim for _, claim in claims_in(cases[command])]
    assert len([claim for claim in claims if claim.is_true]) > 5
    assert not [claim for claim in claims if claim.is_true is False]


@pytest.mark.parametrize(
    ("command", "change"),
    [
        *(
            ("check", change)
            for change in (
                other_mean, one_side, another_sibling, another_sentence, more_values
            )
        ),
        *(
            ("diff", change)
            for change in (other_distance, other_norm, agreement, all_began_alike)
        ),
    ],
)  # fmt: skip
def test_what_is_said_otherwise_is_false(
    cases: dict[str, Case], command: str, change: Wrong
) -> None:
    case = cases[command]
    wrong = copy.deepcopy(dict(case.report))
    change(wrong)
    claims = claims_in(replace(case, report=wrong))
    assert [claim for _, claim in claims if claim.is_true is False]
