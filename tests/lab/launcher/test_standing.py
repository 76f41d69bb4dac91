"""A slow step is not said to stand."""

from __future__ import annotations

import pytest

from tests.launcher.launches import Start
from tests.launcher.test_standing import SCRIPT as SCRIPT
from tests.launcher.test_standing import said
from tests.launcher.ways import installed

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("standing"),
    installed,
]


def test_a_step_slower_than_others_but_below_the_limit_is_not_said_to_stand(launch: Start):
    job = launch(["goes", "slow"], "--rs-stall-seconds", 30)
    assert job.wait() == 0, job.err
    assert said(job) == []
    assert not (job.out / "stalls").exists()
