"""The board of programs from outside: that the table is whole, one program, and all as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.outside.__main__ import LATER, Runs, judge, load, prove
from tests.lab.outside.answers import FIRST, ROWS, SECOND


@pytest.mark.parametrize("board", ["", *LATER])
def test_every_program_has_an_answer_and_every_answer_a_program(board: str) -> None:
    rows, folder = load(board)
    programs = {path.stem for path in (folder / "programs").glob("*.py")} - {"common"}
    assert programs == rows.keys()
    references = {"one"} if board in LATER else {"one", "twin"}
    assert {row.reference for row in rows.values()} <= references
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


@pytest.mark.soak
@pytest.mark.launch
@pytest.mark.parametrize(("board", "name"), [(s, name) for s in LATER for name in load(s)[0]])
def test_a_program_of_a_later_set_is_judged(tmp_path: Path, board: str, name: str) -> None:
    rows, folder = load(board)
    assert judge(name, rows[name], Runs(name, rows[name], tmp_path, folder))
