"""The fourth board: that the table is whole, and all of it as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.outside.__main__ import Runs, judge, load

ROWS, BOARD = load("fourth")


def test_every_program_has_an_answer_and_every_answer_a_program() -> None:
    programs = {path.stem for path in (BOARD / "programs").glob("*.py")} - {"common"}
    assert programs == ROWS.keys()
    assert all(row.reference == "one" or row.reference_ranks > 1 for row in ROWS.values())


@pytest.mark.soak
@pytest.mark.launch
@pytest.mark.parametrize("name", ROWS)
def test_a_program_is_judged(tmp_path: Path, name: str) -> None:
    assert judge(name, ROWS[name], Runs(name, ROWS[name], tmp_path, BOARD))
