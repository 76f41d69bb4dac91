"""A job that somebody ended is no fault: its verdict is that of what was traced. A job in which a
rank failed, or that stood still, stays what it is, whoever ended it then."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.launches import Launch, Start, launching, rankscope
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("cancelled"), installed]

SCRIPT = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
folder, ways = pathlib.Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
rank = dist.get_rank()
way = ways[rank] if len(ways) > 1 else ways[0]
stopped = []
if way == "in order":  # as a trainer does that saves a checkpoint
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
step = 0
while not (step == 200 or way == "returns" and step == 6):
    if way == "stands" and step == 5:
        time.sleep(600)
    if way == "fails" and step == 5:
        raise ValueError("on purpose")
    model(torch.ones(2, 4)).square().sum().backward()
    stop = torch.tensor(float(len(stopped)))
    dist.all_reduce(stop)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    (folder / f"step.{rank}").write_text(str(step))
    if stop:
        sys.exit(0)
    time.sleep(0.05)
(folder / f"idle.{rank}").touch()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with launching(tmp_path_factory.mktemp("cancelled"), SCRIPT, "--rs-steps", "all") as start:
        yield start


def has_reached(job: Launch, step: int) -> bool:
    paths = [*job.meeting.glob("step.*")]
    return len(paths) == 2 and all(int(path.read_text() or 0) >= step for path in paths)


def checked(out: Path) -> tuple[int, dict[str, object]]:
    done = rankscope("check", out, "--json")
    return done.returncode, json.loads(done.stdout)["result"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.lab)]
)
def test_the_verdict_on_a_cancelled_job_is_that_of_what_was_traced(
    launch: Start, tmp_path: Path, number: signal.Signals
):
    told = tmp_path / "told"
    job = launch(["trains", "trains"], "--rs-on-finding", f"cat >> {told}", "--rs-drain-seconds", 5)
    assert wait_until(lambda: has_reached(job, 80)), job.logs  # the live check looks by now
    if number == signal.SIGINT:
        os.killpg(job.process.pid, number)  # Ctrl-C is for all of the terminal's group
    else:
        job.process.send_signal(number)
    assert job.wait() != 0
    code, report = checked(job.out)
    assert (code, report["verdict"], report["findings"]) == (0, "clean", []), (report, job.logs)
    assert f"interrupted by {number.name}" in " ".join(map(str, report["notes"]))
    ended = json.loads((job.out / "trace.json").read_bytes())["run"]["ended"]
    assert (ended["how"], ended["by"]) == ("interrupted", number.name)
    assert f"interrupted by {number.name}" in job.err
    assert rankscope("verify", job.out).returncode == 0
    assert f"complete; interrupted by {number.name}" in rankscope("show", job.out).stdout
    lines = (
        (job.out / "findings.jsonl").read_text() if (job.out / "findings.jsonl").exists() else ""
    )
    assert "crash" not in lines and not told.exists()


def test_a_rank_that_failed_first_is_a_crash_though_its_peers_got_a_signal(launch: Start):
    job = launch(["trains", "fails"])
    assert job.wait() == 1
    code, report = checked(job.out)
    assert (code, report["verdict"]) == (1, "fault"), job.logs
    assert [(f["kind"], f["ranks"]) for f in report["findings"] if f["origin"]] == [("crash", [1])]
    assert "ended" not in json.loads((job.out / "trace.json").read_bytes())["run"]


def test_a_black_box_keeps_the_steps_before_a_signal_that_ranks_took_in_order(launch: Start):
    job = launch(["in order", "in order"], "--rs-steps", "last:3")
    assert wait_until(lambda: has_reached(job, 10)), job.logs
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    trace = json.loads((job.out / "trace.json").read_bytes())
    (asked,) = trace["completeness"]["asked"]
    assert "SIGTERM" in asked["text"] or "ended" in asked["event"], asked
    assert not asked["missing"] and len(trace["steps"]) >= 3
    assert checked(job.out)[0] == 0
