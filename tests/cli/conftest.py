"""What commands print must not depend on who runs the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test runner's own width is not the reader's."""
    monkeypatch.delenv("COLUMNS", raising=False)
