"""docs/lab/fault-benchmark.md is held to the code: every option, and every row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.faults.__main__ import FAULTS, REFERENCE, parser
from tests.lab.faults.runs import about


def page(repository: Path) -> str:
    return (repository / "docs" / "lab" / "fault-benchmark.md").read_text()


def test_every_option_is_on_the_page(repository: Path) -> None:
    options = [o for action in parser()._actions for o in action.option_strings if o[:2] == "--"]
    missing = [o for o in options if o != "--help" and f"`{o}" not in page(repository)]
    assert not missing


@pytest.mark.parametrize("table", [FAULTS, REFERENCE])
def test_every_row_is_on_the_page(repository: Path, table: str) -> None:
    text = page(repository)
    missing = [
        name
        for name, what in about(table).items()
        if f"`{name}`" not in text and f"| {name} | {what} |" not in text
    ]
    assert not missing
