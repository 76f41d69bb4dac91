"""`rankscope capture`: late ranks, killed companions, several hosts, and what is no order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rankscope.run.folders import ORDER_NAME
from rankscope.tree.reader import open_trace
from tests import forked
from tests.launcher.launches import BIN, Start, kill, rankscope
from tests.launcher.test_capture import OPTIONS as OPTIONS
from tests.launcher.test_capture import SCRIPT as SCRIPT
from tests.launcher.test_capture import capture, has_records, is_at, step_of, traced
from tests.launcher.ways import installed
from tests.noted import remarks
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("capture"),
    installed,
]


def order_text(**fields: object) -> str:
    """Return what stands in the file of an order, some of it otherwise."""
    usual = {"number": time.time_ns(), "steps": 1, "paths": [], "tensors": []}
    return json.dumps(usual | fields)


def test_a_rank_that_was_late_says_which_steps_it_missed(launch: Start):
    job = launch(["apart", "apart"])
    assert is_at(job, 3, rank=1)
    (job.meeting / "pause.1").touch()
    assert wait_until(lambda: (job.meeting / "paused.1").exists())
    behind = step_of(job, 1)
    assert is_at(job, behind + 20)
    (job.meeting / "pause.0").touch()
    assert wait_until(lambda: (job.meeting / "paused.0").exists())
    ordered = capture(job, "--no-wait", "--steps", 2)
    assert ordered.returncode == 0, ordered.stderr
    assert wait_until(lambda: [*job.spool.rglob(ORDER_NAME)])  # the relay has brought it
    (job.meeting / "pause.1").unlink()
    assert is_at(job, behind + 12, rank=1)  # traces two steps that rank 0 has behind it
    (job.meeting / "pause.0").unlink()
    assert wait_until(lambda: "saw the order too late" in job.err)
    again = capture(job)
    assert again.returncode == 0, (again.stdout, again.stderr)
    (job.meeting / "go").touch()
    assert job.wait() == 0, job.logs
    found = traced(job.out)
    first = sorted(found)[1]
    noted = {
        (step.step, rank)
        for step in open_trace(job.out).steps
        for each in remarks(step)
        for rank in each.ranks
        if "this rank saw the order too late" in str(each)
    }
    assert {(first, 0), (first + 1, 0)} <= noted
    for step, ranks in found.items():
        assert all(rank in ranks["first"] or (step, rank) in noted for rank in (0, 1)), found


def test_an_order_outlives_a_killed_companion(launch: Start):
    job = launch(["", ""])
    assert is_at(job, 3) and wait_until(lambda: has_records(job))
    first = job.companion()
    kill(first, signal.SIGKILL)
    ordered = capture(job)
    assert ordered.returncode == 0, (ordered.stdout, ordered.stderr, job.logs)
    (job.meeting / "go").touch()
    assert job.wait() == 0, job.logs
    found = traced(job.out)
    assert len(found) == 2 and all(each["first"] == {0, 1} for each in found.values())


NO_ORDERS = (
    order_text(number=10**30),
    order_text(number=-(10**30)),
    order_text(number=0),
    order_text(steps=10**9),
    order_text(steps=True),
    order_text(paths=["x" * 4000]),
    order_text(paths="first"),
    order_text(number="1e400").replace('"1e400"', "1e400"),
    order_text(number="9" * 5000).replace('"', " "),
    "[" * 100_000,
    "x" * 10_000_000,
    "",
)


def test_what_is_no_order_ends_no_companion_and_no_rank(launch: Start):
    job = launch(["", ""])
    assert is_at(job, 3) and wait_until(lambda: has_records(job))
    refused = capture(job, "--steps", 10**30)
    assert refused.returncode == 2 and "expected 1 to 100000" in refused.stderr, refused.stderr
    (run_folder,), log = job.spool.glob("*/*"), job.out / "collector.log"
    companion, ranks = job.companion(), job.ranks()
    for number, text in enumerate(NO_ORDERS):
        for folder in (run_folder, job.out / "spool"):
            (folder / "order.new").write_text(text)
            (folder / "order.new").replace(folder / ORDER_NAME)
        assert wait_until(lambda n=number: log.read_text().count("is not an order") == n + 1), (
            text[:100],
            job.logs,
        )
        assert is_at(job, step_of(job) + 2)
    os.mkfifo(job.out / "spool" / "pipe")
    (job.out / "spool" / "pipe").replace(job.out / "spool" / ORDER_NAME)
    assert wait_until(lambda: log.read_text().count("is not an order") > len(NO_ORDERS))
    assert (job.companion(), job.ranks()) == (companion, ranks), job.logs
    ordered = capture(job)
    assert ordered.returncode == 0, (ordered.stdout, ordered.stderr, job.logs)
    (job.meeting / "go").touch()
    assert job.wait() == 0, job.logs
    assert len(traced(job.out)) == 2 and open_trace(job.out).is_complete


def test_a_black_box_hands_out_the_steps_it_holds(launch: Start):
    job = launch(["", ""], "--rs-steps", "last:4", "--rs-spool-bytes", "8M")
    assert is_at(job, 20)
    ordered = capture(job, "--steps", 9)
    assert ordered.returncode == 0, (ordered.stdout, ordered.stderr, job.logs)
    assert "are held and sent" in ordered.stdout and "there: " in ordered.stdout
    assert "these are all one can have" in ordered.stdout
    again = capture(job)
    assert again.returncode == 0, (again.stdout, again.stderr, job.logs)
    (job.meeting / "go").touch()
    assert job.wait() == 0, job.logs
    found = traced(job.out)
    assert 5 <= len(found) <= 10 and min(found) > 10
    assert all(each["first"] == {0, 1} for each in found.values()), found
    assert any("rankscope capture asked for it" in str(e) for e in open_trace(job.out).happened)


def test_hosts_that_share_the_folder_trace_the_same_steps(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    port = free_port()
    hosts = [
        forked.Popen(
            [str(BIN / "rankscope"), "run", *OPTIONS, "--rs-out", str(tmp_path / "trace")]
            + ["--rs-spool", str(tmp_path / f"spool{node}"), "--rs-drain-seconds", "2"]
            + ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1"]
            + ["--master-port", port, "--nproc-per-node", "1"]
            + [str(tmp_path / "script.py"), str(meeting), "", ""],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        assert wait_until(lambda: (meeting / "step.1").exists())
        assert wait_until(lambda: int((meeting / "step.1").read_text()) > 5)
        ordered = rankscope("capture", tmp_path / "trace", "--seconds", 60, "--steps", 2)
        assert ordered.returncode == 0, (ordered.stdout, ordered.stderr)
        (meeting / "go").touch()
        said = [host.communicate(timeout=120)[1] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert [host.returncode for host in hosts] == [0, 0], said
    found = traced(tmp_path / "trace")
    assert len(found) == 3 and all(each["first"] == {0, 1} for each in found.values()), found
