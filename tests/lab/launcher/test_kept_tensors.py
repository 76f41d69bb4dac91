"""Full tensors kept by a job, beyond the disk, on another host, and recovered."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rankscope.tree.reader import open_trace
from tests import forked
from tests.launcher.launches import BIN, Launch, kill, rankscope
from tests.launcher.test_kept_tensors import all_kept, notes_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("kept")]


def test_a_budget_beyond_the_disk_costs_the_trace_and_not_the_training(tmp_path):
    (tmp_path / "script.py").write_text("open('trained', 'w')")
    done = rankscope(
        "run", "--rs-tensors", "**", "--rs-tensor-budget", "900000T", "--nproc-per-node", 2,
        "script.py", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    assert "not tracing: " in done.stderr and "--rs-tensor-budget" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py", "trained"]


def test_recover_carries_the_tensors_along(tmp_path):
    """A tree that was never built: the companion is gone with the launcher."""
    job = Launch(
        tmp_path / "job", ["wait", "wait"], "--rs-tensors", "**:output", "--rs-steps", "all"
    )
    try:
        job.trained()
        kill(job.process.pid)
        kill(job.companion())
        for pid in job.ranks():
            kill(pid)
        assert wait_until(lambda: not job.ranks())
    finally:
        job.stop()
    (run_folder,) = job.spool.glob("*/*")
    done = rankscope("recover", run_folder, job.out, "--out", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(job.out)
    trace = open_trace(tmp_path / "whole")
    counts = all_kept(trace)
    assert min(counts[0], counts[1]) >= 2 * 3
    assert all("was left unfinished" in notes[0] for notes in notes_of(trace).values())


def test_tensors_of_a_host_that_does_not_see_the_trace_folder_are_shipped_there(tmp_path):
    """One rank is killed: what it left is finished there; nothing stays on the ranks' host."""
    out, address = tmp_path / "collected", f"ipc://{tmp_path}/c.sock"
    words = [BIN / "rankscope", "collect", "--out", out, "--bind", address, "--world-size", 2]
    collector = forked.Popen([*map(str, words)], stderr=subprocess.DEVNULL)
    job = None
    try:
        assert wait_until((tmp_path / "c.sock").exists)
        job = Launch(
            tmp_path / "job", ["exit", "sigkill"], "--rs-tensors", "**", "--rs-collector", address
        )
        assert job.wait() == 1
        assert collector.wait(120) is not None
    finally:
        if job is not None:
            job.stop()
        collector.kill()
        collector.wait()
    trace = open_trace(out)
    counts = all_kept(trace)
    assert counts[0] == counts[1] > 30
    notes = notes_of(trace)
    assert "was left unfinished" in notes[1][0]
    assert not job.out.exists()
    assert wait_until(lambda: not any(job.spool.rglob("*")))
