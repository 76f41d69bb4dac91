"""A fault in a running job is on stderr while it runs, and the job is left alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from tests.companion.running.replayed import told
from tests.launcher.launches import Start, kill
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
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(1 + rank)
def everywhere(name):
    seen = torch.tensor([float((folder / name).exists())])
    dist.all_reduce(seen)
    return seen.item() == 2
has_drifted, step = False, 0
(folder / f"trained.0.{rank}").touch()
while not everywhere("leave"):
    if not has_drifted and everywhere("drift"):
        has_drifted = True
        if rank == 1:
            with torch.no_grad():
                model[1].weight[0, 0] += 0.5
    model(torch.randn(2, 4)).square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_a_drift_is_on_stderr_while_the_job_runs(launch: Start, tmp_path: Path):
    job = launch(
        ["a", "b"], "--rs-steps", "every:4", "--rs-on-finding", f"cat >> {tmp_path / 'given'}"
    )
    job.trained()
    assert wait_until(lambda: job.beside(), 60.0), job.logs
    kill(job.beside())  # it is started again
    kill(job.companion())  # and so is what starts it
    time.sleep(1.0)
    assert told(job.out) == []
    (job.meeting / "drift").touch()
    assert wait_until(lambda: "replica-mismatch" in job.err, 60.0), job.logs
    (line,) = (line for line in job.err.splitlines() if "replica-mismatch" in line)
    assert line.startswith("rankscope: train step ")
    assert "replica-mismatch at 1 param:weight, ranks 0-1" in line
    assert line.endswith(" s ago): rankscope check trace")
    assert wait_until(lambda: (tmp_path / "given").exists())
    (job.meeting / "leave").touch()
    assert job.wait() == 0
    (found,) = told(job.out)
    assert json.loads((tmp_path / "given").read_text()) == found
    assert found["step"] % 4 == 0
    trace = open_trace(job.out)
    assert trace.is_complete
    assert wait_until(lambda: not job.beside())
