"""The guard on cost says "worse" where it is, and its probe measures with the public surface."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.lab import cost


@pytest.mark.parametrize(
    ("pairs", "is_fine"),
    [
        ([(1.0, 1.0)] * 5, True),
        ([(1.0, 1.019)] * 5, True),
        ([(1.0, 1.03)] * 5, False),
        ([(2.0, 1.0)] * 5, True),
        ([(1.0, 0.9), (1.0, 0.95), (1.0, 1.04), (1.0, 1.3), (1.0, 1.4)], True),
        ([(1.0, 1.02), (1.0, 1.03), (1.0, 1.04), (1.0, 1.3), (1.0, 0.9)], False),
    ],
)
def test_a_figure_is_worse_beyond_two_per_cent_and_its_quartiles(
    pairs: list[tuple[float, float]], is_fine: bool
) -> None:
    line, found = cost.verdict(pairs)
    assert found is is_fine
    assert line.startswith("not worse" if is_fine else "WORSE")


@pytest.mark.launch
def test_the_probe_of_a_job_gives_every_figure() -> None:
    command = [sys.executable, str(cost.PROBE), "job"]
    done = subprocess.run(command, cwd=cost.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert len(figures) == 7
    assert all(value > 0 for value in figures.values()), figures


def test_a_commit_that_is_none_is_named() -> None:
    command = [sys.executable, "-m", "tests.lab.cost", "no-such-commit"]
    done = subprocess.run(command, cwd=cost.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no-such-commit" in done.stderr
