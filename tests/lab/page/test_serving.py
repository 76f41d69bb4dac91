"""The server of pages beside a job that runs."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rankscope.tree.reader import open_trace

SLOW_JOB = """
import os, time, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(400):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(step))).sum().backward()
    optimizer.step()
    time.sleep(0.05)
    seen = torch.tensor(float(step > 5 and os.path.exists(sys.argv[1])))
    dist.all_reduce(seen)  # the ranks leave in the same step
    if seen:
        break
dist.destroy_process_group()
"""


@pytest.mark.launch
def test_beside_a_running_job_the_data_grow_and_end_with_it(tmp_path: Path) -> None:
    script, stop, out = tmp_path / "job.py", tmp_path / "stop", tmp_path / "trace"
    script.write_text(SLOW_JOB)
    job = subprocess.Popen(
        [sys.executable, "-m", "rankscope", "run", "--rs-out", str(out), "--rs-steps", "all",
         "--nproc-per-node", "2", str(script), str(stop)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    server = None
    try:
        deadline = time.monotonic() + 90
        while not list(out.glob("spool/*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        while server is None and time.monotonic() < deadline:
            started = subprocess.Popen(
                [sys.executable, "-m", "rankscope", "serve", str(out)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            line = started.stdout.readline()
            if line.startswith("http://127.0.0.1:"):
                server = started
            else:  # no step is there yet
                started.wait(30)
                time.sleep(0.5)
        assert server is not None
        url = urlsplit(line.strip())

        def data() -> dict:
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
            connection.request("GET", f"/data?{url.query}")
            found = json.loads(connection.getresponse().read())
            connection.close()
            return found

        first = data()
        assert first["data"]["live"]
        assert "running" in first["sections"]["ranks"]
        while len(data()["data"]["steps"]) <= len(first["data"]["steps"]):
            assert time.monotonic() < deadline
            time.sleep(0.3)
        stop.touch()
        assert job.wait(60) == 0
        while data()["data"]["live"]:
            assert time.monotonic() < deadline
            time.sleep(0.3)
        last = data()
        assert "complete" in last["sections"]["job"]
        assert "ended" in last["sections"]["ranks"]
        trace = open_trace(out)
        assert len(last["data"]["steps"]) == len(trace.steps) + len(trace.setup)
    finally:
        stop.touch()
        for process in (server, job):
            if process is not None:
                process.terminate()
                process.wait(60)
