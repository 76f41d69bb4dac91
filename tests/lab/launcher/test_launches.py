"""A script around every rank; plain Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_launches import expected as expected
from tests.launcher.ways import RANKSCOPE, TORCHRUN, installed, start, start_forked, steps_of
from tests.torches import of_program

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("ways")]


def test_a_script_around_every_rank_is_no_launcher_of_its_own(tmp_path: Path, expected: Any):
    """As `torchrun --no-python numactl.sh`: the shells have other numbers, the run is one."""
    start_forked(
        [*TORCHRUN, "--nproc-per-node", "2", "--no-python", "sh", "-c"]
        + [f"{sys.executable} ddp.py; exit $?"],
        tmp_path / "trace",
        RANKSCOPE="1",
    )
    assert steps_of(tmp_path / "trace") == expected


def test_plain_python_gives_the_tree_that_one_rank_under_rankscope_run_gives(tmp_path: Path):
    plain = start([sys.executable, "one_process.py"], tmp_path / "a", RANKSCOPE="1")
    ran = start_forked([RANKSCOPE, "run", "one_process.py"], tmp_path / "b")
    assert of_program(plain.stdout) == of_program(ran.stdout)
    assert steps_of(tmp_path / "a") == steps_of(tmp_path / "b")
