"""docs/lab/real-bugs.md is held to the table: every bug, its source, and whether it is named."""

from __future__ import annotations

from pathlib import Path

from tests.lab.real.rows import ROWS


def test_every_bug_stands_on_the_page_with_its_source_and_what_is_missed(repository: Path) -> None:
    text = (repository / "docs" / "lab" / "real-bugs.md").read_text()
    missing = [row.name for row in ROWS if row.in_words not in text]
    assert not missing


def test_every_reason_for_a_miss_stands_on_the_page(repository: Path) -> None:
    text = (repository / "docs" / "lab" / "real-bugs.md").read_text()
    missing = [
        row.name for row in ROWS if row.missed and f"* {row.name}: {row.missed}\n" not in text
    ]
    assert not missing
