"""Jobs of the script of the test's own module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launches import Start, launching
from tests.launcher.ways import RANKSCOPE, start_forked, steps_of
from tests.torches import of_program


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a job of the module's `SCRIPT`: `launch(ways, options...)`; without options, with the
    module's `OPTIONS`."""
    module = request.module
    with launching(tmp_path, module.SCRIPT, *getattr(module, "OPTIONS", ())) as start:
        yield start


@pytest.fixture(scope="session")
def ddp_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """What `rankscope run` makes of the example `ddp.py` on two ranks, and what that prints.

    That it prints the same untraced is a test of every example.
    """
    out = tmp_path_factory.mktemp("run") / "trace"
    done = start_forked([RANKSCOPE, "run", "--nproc-per-node", "2", "ddp.py"], out)
    assert f"trace in {out}" in done.stderr
    return steps_of(out), of_program(done.stdout)
