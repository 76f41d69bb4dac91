"""Jobs of the script of the test's own module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.launches import Start, launching


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a job of the module's `SCRIPT`: `launch(ways, options...)`; without options, with the
    module's `OPTIONS`."""
    module = request.module
    with launching(tmp_path, module.SCRIPT, *getattr(module, "OPTIONS", ())) as start:
        yield start
