"""`rankscope layout` held to the true layouts of right programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.diagnosis.check import check
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Verdict
from tests.distributed.pool import RankPool
from tests.lab.faults.layouts import TRUE, TrueLayout, compared, proposal_of

PAGE = Path(__file__).parents[3] / "docs/commands/layout.md"


def name_of(true: TrueLayout) -> str:
    return f"{true.program} | `{','.join(f'{axis}={size}' for axis, size in true.axes.items())}`"


@pytest.mark.parametrize("true", TRUE, ids=name_of)
def test_a_proposal_contradicts_nothing_that_is_true_and_raises_no_alarm(
    ranks: RankPool, tmp_path: Path, true: TrueLayout
) -> None:
    trace, text = proposal_of(ranks, true, tmp_path)
    found = compared(trace, true, text)
    assert found.wrong == ()
    assert found.found / found.true >= 0.9, text
    bare, declared = check(trace), check(trace, LayoutFile.parse(text))
    assert (bare.verdict, declared.verdict) == (Verdict.CLEAN, Verdict.CLEAN)
    assert declared.coverage >= bare.coverage
    assert declared.undeclared <= bare.undeclared


def test_the_page_names_every_program() -> None:
    page = PAGE.read_text()
    assert all(f"`{true.program}`" in page for true in TRUE)
