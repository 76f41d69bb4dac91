"""Jobs that stood still, or lost a rank, before somebody ended them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.launcher.launches import Start, launching, rankscope
from tests.launcher.test_cancelled import SCRIPT, checked, has_reached
from tests.launcher.test_cancelled import launch as launch
from tests.launcher.ways import installed
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("cancelled"), installed]


APART = """
import os, pathlib, sys, time
import torch
folder, ways = pathlib.Path(sys.argv[1]), sys.argv[2:]
rank = int(os.environ["RANK"])
way, _, at = ways[rank].partition("@")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(400):
    if step == int(at or -1):
        if way == "leaves":
            os._exit(0)
        raise {"raises": ValueError, "stops": KeyboardInterrupt}[way]("on purpose")
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (folder / f"step.{rank}").write_text(str(step))
    time.sleep(0.02)
    if step == 60 and not ways[1].startswith("leaves"):
        break
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with launching(tmp_path_factory.mktemp("apart"), APART, "--rs-steps", "all") as start:
        yield start


def test_a_job_that_stood_still_before_the_signal_was_not_cancelled(launch: Start):
    job = launch(["trains", "stands"])
    assert wait_until(lambda: has_reached(job, 5)), job.logs
    time.sleep(4)  # longer than a collective of this job ever took
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() != 0
    code, report = checked(job.out)
    assert code == 1 and report["verdict"] != "clean", (report, job.logs)
    assert "ended" not in json.loads((job.out / "trace.json").read_bytes())["run"]


def test_a_rank_that_was_gone_before_the_signal_is_not_excused_by_it(apart: Start):
    job = apart(["trains", "leaves@5"])
    step = job.meeting / "step.0"
    assert wait_until(lambda: step.exists() and int(step.read_text() or 0) > 30), job.logs
    job.process.send_signal(signal.SIGINT)
    assert job.wait() != 0
    code, report = checked(job.out)
    assert code == 1 and report["verdict"] != "clean", report
    assert "ended" not in json.loads((job.out / "trace.json").read_bytes())["run"]


@pytest.mark.parametrize("way", ["raises@20", "stops@20"])
def test_a_rank_that_raised_long_before_the_others_ended_is_a_crash(apart: Start, way: str):
    job = apart(["trains", way], "--rs-steps", "all", "--monitor-interval", 60)
    assert job.wait() == 1
    code, report = checked(job.out)
    assert (code, report["verdict"]) == (1, "fault"), (report, job.logs)
    assert [(f["kind"], f["ranks"]) for f in report["findings"] if f["origin"]] == [("crash", [1])]


def test_ranks_that_are_killed_after_the_job_returned_lack_nothing(tmp_path: Path):
    """As frameworks do that start the ranks by themselves and end them when they are done."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "meeting").mkdir()
    out, port = tmp_path / "trace", free_port()
    settings = {"": "1", "_OUT": out, "_SPOOL": tmp_path / "spool", "_STEPS": "all"}
    shared = {f"RANKSCOPE{name}": str(value) for name, value in settings.items()}
    shared |= {"RANKSCOPE_DRAIN_SECONDS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        forked.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "meeting"), "returns"],
            env={**os.environ, **shared, "WORLD_SIZE": "2", "RANK": str(rank),
                 "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert wait_until(lambda: len([*(tmp_path / "meeting").glob("idle.*")]) == 2)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait(60)
    assert wait_until(lambda: (out / "trace.json").exists())
    code, report = checked(out)
    assert (code, report["verdict"]) == (0, "clean"), report
    assert "all ranks were killed between two steps" in " ".join(map(str, report["notes"]))
    assert rankscope("verify", out).returncode == 0
