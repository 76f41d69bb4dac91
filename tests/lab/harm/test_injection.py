"""Whatever fails in rankscope, the training is bitwise the same and nothing is raised into it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

_LIMIT_S = 600
_SLOW_LIMIT_S = 6 * 3600


def _examined(*arguments: str, limit_s: float = _LIMIT_S) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab.harm", *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_failures_put_into_a_sample_of_all_sites_change_no_training():
    """A few dozen of some thousand; another seed takes others."""
    said = _examined("--way", "block", "--way", "rank", "--most", "24")
    found = re.findall(r"(\d+) failures .*, 0 harmed", said)
    assert found == ["24", "24"], said


@pytest.mark.soak
def test_failures_put_into_every_site_change_no_training():
    assert "harmed" in _examined(limit_s=_SLOW_LIMIT_S)
