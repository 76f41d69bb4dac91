"""The board of hangs: some jobs, and all of them as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.hangs.rows import BY_NAME, ROWS
from tests.lab.hangs.runs import judged

QUICK = ("ddp-backward-left-out", "pipeline-gradient-left-out", "ddp-in-untraced-steps")
"""One of each way to stand: in what no record tells of, in a message, in a step not traced."""


def test_the_table_is_whole() -> None:
    assert len(ROWS) == len(BY_NAME)
    assert len([row for row in ROWS if row.missing]) > 20
    assert len([row for row in ROWS if not row.missing]) > 1
    assert {row.ranks for row in ROWS} == {2, 3, 4}


@pytest.mark.parametrize("name", QUICK)
def test_the_rank_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    outcome = judged(BY_NAME[name], tmp_path / name)
    assert outcome.is_right, outcome.said


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in QUICK])
def test_every_missing_rank_is_named(tmp_path: Path, name: str) -> None:
    outcome = judged(BY_NAME[name], tmp_path / name)
    assert outcome.is_right, outcome.said
