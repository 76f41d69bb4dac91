"""docs/lab/fault-benchmark.md is held to the code: every option."""

from __future__ import annotations

from pathlib import Path

from tests.lab.faults.__main__ import parser


def test_every_option_is_on_the_page(repository: Path) -> None:
    options = [o for action in parser()._actions for o in action.option_strings if o[:2] == "--"]
    page = (repository / "docs" / "lab" / "fault-benchmark.md").read_text()
    missing = [o for o in options if o != "--help" and f"`{o}" not in page]
    assert not missing
