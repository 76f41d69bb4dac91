"""The board of unusual programs: its proofs, that the table is whole, and all of it as a soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.lab.faults.runs import Run, every_run, proved, scored
from tests.lab.faults.setup import Setup, Shape
from tests.lab.unusual import referencerows, rows
from tests.lab.unusual.__main__ import CHECK, DIFF
from tests.lab.unusual.case import Case
from tests.lab.unusual.summary import ALIKE, RIGHT, SHOWN, counts

QUICK = ("gossip", "tied-stages", "contrast-through-gather")
"""One of each kind of oracle, and of each kind of answer."""
FIRST = {
    CHECK: {
        (RIGHT, "seen"): 31,
        (RIGHT, "unseen"): 39,
        (SHOWN, "seen"): 4,
        (SHOWN, "unseen"): 9,
        (ALIKE, "seen"): 12,
        (ALIKE, "unseen"): 9,
    },
    DIFF: {
        (RIGHT, "seen"): 25,
        (RIGHT, "unseen"): 24,
        (SHOWN, "seen"): 4,
        (SHOWN, "unseen"): 10,
        (ALIKE, "seen"): 9,
        (ALIKE, "unseen"): 6,
    },
}
"""Exact answers of the first score, by table, kind and half."""


def mistakes(cases: tuple[Case, ...]) -> list[Case]:
    return [case for case in cases if case.has_fault]


@pytest.mark.parametrize("name", QUICK)
def test_a_program_is_proved_right_and_its_mistake_wrong(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    world = rows.BY_NAME[name].ranks[0]
    for is_faulty in (False, True):
        run = Run(name=name, setup=Setup(ranks=world, is_faulty=is_faulty), table=CHECK)
        assert bool(proved(ranks, run, tmp_path)) == is_faulty


def test_the_table_is_whole() -> None:
    assert len(rows.CASES) == len(rows.BY_NAME) == 76
    assert len(mistakes(rows.CASES)) == 64
    assert {world for case in rows.CASES for world in case.ranks} == {2, 3, 4}
    assert len({case.about for case in rows.CASES}) == len(rows.CASES)


def test_every_mistake_has_an_answer_of_check_or_of_diff() -> None:
    for case in mistakes(rows.CASES):
        assert case.is_shown_by_ranks or (case.beside and case.reference), case.name
    for case in rows.CASES:
        assert not (case.beside and not case.reference), case.name


def test_the_answers_can_be_asked_for_in_every_setup() -> None:
    for table in (rows.ROWS, referencerows.ROWS):
        for case in table:
            setup = Setup(ranks=case.ranks[0], is_faulty=case.has_fault)
            expected = case.expected(setup)
            assert expected is None or (expected.kinds and expected.places and expected.ranks)


def test_the_halves_are_drawn_by_name_and_are_of_a_size() -> None:
    unseen = [case.name for case in rows.CASES if case.is_unseen]
    assert abs(2 * len(unseen) - len(rows.CASES)) <= 8
    assert rows.BY_NAME["gossip"].half == rows.BY_NAME["gossip"].for_diff().half


@pytest.mark.parametrize("table", [rows, referencerows], ids=["check", "diff"])
def test_every_row_is_on_the_page(repository: Path, table: object) -> None:
    page = (repository / "docs" / "lab" / "unusual-programs.md").read_text()
    missing = [row.name for row in table.ROWS if f"`{row.name}`" not in page]
    assert not missing


@pytest.mark.soak
@pytest.mark.parametrize("name", rows.BY_NAME)
def test_every_proof_holds(ranks: RankPool, tmp_path: Path, name: str) -> None:
    asked = {"shape": Shape(layers=3, hidden=24), "seeds": 2, "only": [name], "table": CHECK}
    for number, run in enumerate(every_run(**asked)):
        told = proved(ranks, run, tmp_path / str(number))
        assert bool(told) == run.setup.is_faulty, f"{run.label}: {told}"


@pytest.mark.soak
@pytest.mark.parametrize("table", [CHECK, DIFF])
def test_no_score_is_below_the_first_one(ranks: RankPool, tmp_path: Path, table: str) -> None:
    """The first score stands on the page; single rows of the unseen half are not looked at."""
    runs = every_run(shape=Shape(layers=3, hidden=24), seeds=1, table=table)
    outcomes = [scored(ranks, run, tmp_path / str(number)) for number, run in enumerate(runs)]
    exact = {key: line.exact for key, line in counts(outcomes).items()}
    assert exact.keys() == FIRST[table].keys()
    assert not {key: n for key, n in FIRST[table].items() if exact[key] < n}
