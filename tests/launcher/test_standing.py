"""A job that stands still is noticed while it does, said once, and left alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rankscope.companion.hostwatch import StallMonitor
from rankscope.companion.shipping import Shipment
from rankscope.run.folders import read_run_header, streams
from rankscope.run.jobstatus import stalls_in
from tests.launcher.launches import Launch, Start, rankscope
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("standing"),
    installed,
]
SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
folder, way = pathlib.Path(sys.argv[1]), sys.argv[2 + int(os.environ["RANK"])]
dist.init_process_group("gloo")
rank = dist.get_rank()
def wait_for(name):
    (folder / f"waiting.{rank}").touch()
    while not (folder / name).exists():
        time.sleep(0.01)
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        if step == 1 and way == "skips":
            wait_for("go")
        if step == 1 and way == "slow":
            time.sleep(2.0)
        x = self.linear(x)
        total = x.detach().clone()
        dist.all_reduce(total)
        return x + total
dist.barrier()
torch.manual_seed(0)
model = torch.nn.Sequential(Layer(), Layer())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if way in ("rests", "skips"):
    wait_for("leave")
dist.barrier()
"""


def said(job: Launch) -> list[str]:
    """The launcher's lines about moving."""
    return [line for line in job.err.splitlines() if " moved" in line]


def checked(job: Launch) -> dict[str, Any]:
    done = rankscope("check", job.out, "--json")
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)["result"]
    return report


def hangs(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["kind"] == "hang"]


def would_be_noted(job: Launch, folder: Path) -> bool:
    """Whether a relay of this job would note a stall if nothing more came for half a minute."""
    (run_folder,) = job.spool.glob("*/*")
    folder.mkdir()
    shipments = {stream: Shipment(run_folder, stream) for stream in streams(run_folder)}
    for shipment in shipments.values():
        shipment.acked = shipment.sent = shipment.reader.committed()
        shipment.reader.close()
    monitor = StallMonitor(folder, read_run_header(run_folder), "another")
    begin = time.monotonic()
    for second in range(30):
        monitor.look(shipments, begin + second)
    return bool(stalls_in(folder))


def states(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]


def test_a_rank_that_skips_a_collective_is_noticed_while_the_job_stands_and_when_it_goes_on(
    launch: Start, tmp_path: Path
):
    job = launch(["rests", "skips"], "--rs-stall-seconds", 2)
    assert wait_until(lambda: (job.meeting / "waiting.1").exists()), job.err
    stood_at = time.time()
    ranks = job.ranks()
    assert wait_until(lambda: said(job)), job.err
    assert time.time() - stood_at > 1.5
    host = os.uname().nodename
    (line,) = said(job)
    assert line.startswith(f"rankscope: no rank of {host} has moved since ")
    assert "ranks 0-1 in" in line or ("rank 0 in" in line and "rank 1 in" in line)
    assert "rank 0 in a collective of train step 1" in line
    assert would_be_noted(job, tmp_path / "while-it-stands")
    assert line.endswith("rankscope check trace")

    # a job that lives hangs for `check` after 3 s, whatever the limit of the notice
    found: list[dict[str, Any]] = []
    assert wait_until(lambda: found.extend(hangs(checked(job))) or found)
    (hang,) = found
    assert hang["ranks"] == [1]
    (stall,) = hang["evidence"]["stalls"]
    assert stall["host"] == host
    assert stall["until"] is None
    assert 2 <= stall["seconds"] < 60
    text = rankscope("check", job.out).stdout
    assert f"no rank of {host} has moved since " in text

    assert said(job) == [line], "once for each stall"
    assert job.ranks() == ranks
    assert len(ranks) == 2
    assert not {"T", "Z", "X"} & set(states(ranks))

    (job.meeting / "waiting.1").unlink()
    job.go()
    assert wait_until(lambda: len(said(job)) == 2), job.err
    assert said(job)[1].startswith(f"rankscope: no rank of {host} moved from ")
    assert "then it went on" in said(job)[1]
    assert wait_until(lambda: len([*job.meeting.glob("waiting.*")]) == 2)
    assert not would_be_noted(job, tmp_path / "later")  # what was to be traced is over
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.err
    assert job.last_line == f"rankscope: trace in {job.out}; read it: rankscope show trace"
    assert len(said(job)) == 2
    report = checked(job)
    assert hangs(report) == []
    (note,) = [note for note in report["notes"] if "moved" in note]
    assert note.startswith(f"no rank of {host} moved from ")
    assert "then it went on" in note
