"""Jobs whose processes end with the test, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.companion.jobs import Host


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Make hosts of one job: `hosts()` for one, `hosts("name", address=...)` for more."""
    made: list[Host] = []

    def make(name: str = "host", **options: object) -> Host:
        made.append(Host(tmp_path / name, tmp_path / "out", **options))
        return made[-1]

    yield make
    for host in made:
        host.stop()
