"""The board of programs from outside: that the table is whole, one program, and all as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.outside.__main__ import HERE, Runs, judge, prove
from tests.lab.outside.answers import FIRST, ROWS, SECOND


def test_every_program_has_an_answer_and_every_answer_a_program() -> None:
    programs = {path.stem for path in (HERE / "programs").glob("*.py")} - {"common"}
    assert programs == ROWS.keys()
    assert all(row.reference in ("one", "twin") for row in ROWS.values())
    assert len(ROWS) == len(FIRST) + len(SECOND), "no name stands in both sets"


@pytest.mark.launch
@pytest.mark.slow
def test_a_program_is_proved_and_its_mistake_named(tmp_path: Path) -> None:
    runs = Runs("contrast", ROWS["contrast"], tmp_path)
    assert "NOT" not in prove("contrast", ROWS["contrast"], runs)
    words = [(r["command"], r["score"]) for r in judge("contrast", ROWS["contrast"], runs)]
    assert words == [
        ("check", "silent"),
        ("diff", "silent"),
        ("check", "silent"),
        ("diff", "exact"),
    ]


@pytest.mark.soak
@pytest.mark.launch
@pytest.mark.parametrize("name", ROWS)
def test_right_programs_are_silent_and_mistakes_named(tmp_path: Path, name: str) -> None:
    answers = judge(name, ROWS[name], Runs(name, ROWS[name], tmp_path))
    assert {answer["score"] for answer in answers} <= {"silent", "exact"}
