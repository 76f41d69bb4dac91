"""The live check can be switched off."""

from __future__ import annotations

import time

import pytest

from tests.companion.running.replayed import told
from tests.launcher.launches import Start
from tests.launcher.test_live_check import SCRIPT as SCRIPT
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("standing"),
    installed,
]


def test_it_can_be_switched_off(launch: Start):
    job = launch(["a", "b"], "--rs-steps", "every:4", "--rs-live-check", "0")
    (job.meeting / "drift").touch()
    job.trained()
    assert wait_until(job.beside)  # it says where the ranks are all the same
    time.sleep(3.0)
    (job.meeting / "leave").touch()
    assert job.wait() == 0
    *while_it_ran, verdict = job.err.splitlines()
    assert "mismatch" not in "".join(while_it_ran) and told(job.out) == []
    assert verdict.startswith("rankscope: fault: replica-mismatch")
