"""The last line of a job says what `rankscope check` says of its trace."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.launcher.launches import Start, command_line, pids
from tests.launcher.ways import BIN, installed
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("verdict"), installed]

OPTIONS = ("--rs-steps", "all")
SCRIPT = """
import pathlib, sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    scale = float("nan") if step == 1 and "nan" in sys.argv else 1.0
    model(torch.full((2, 4), scale)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SLEEPS = """
import sys, time
if "check" in sys.orig_argv:
    time.sleep(600)
"""


def checked(out: Path) -> tuple[str, str]:
    """Return the verdict of `rankscope check` and where the first finding is, "" for none."""
    done = forked.run(
        [BIN / "rankscope", "check", out], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "0"},
    )  # fmt: skip
    verdict, *rest = done.stdout.splitlines()
    where = [" ".join(line.split()[1:]) for line in rest if line.startswith("  where: ")]
    return verdict, where[0] if where else ""


def test_the_last_line_of_a_job_is_the_verdict_of_its_trace(launch: Start):
    good, bad = launch(["clean"]), launch(["nan"])
    assert [good.wait(), bad.wait()] == [0, 0]
    verdict, _ = checked(good.out)
    assert verdict.startswith("no fault found: ")
    assert good.err.splitlines()[-1] == f"rankscope: {verdict}: rankscope check trace"
    assert good.last_line == f"rankscope: trace in {good.out}; read it: rankscope show trace"
    verdict, where = checked(bad.out)
    assert "train step 1" in where
    line = f"rankscope: {verdict}; first: {where}: rankscope check trace"
    assert bad.err.splitlines()[-1] == line


def test_where_judging_is_cut_short_the_last_line_says_so_and_what_was_found(
    tmp_path: Path, launch: Start, monkeypatch: pytest.MonkeyPatch
):
    """By a signal, as by the time it may take. The exit code stays the job's."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    job = launch(["nan"], "--rs-steps", "all")

    def judges() -> list[int]:
        return [p for p in pids() if {b"check", bytes(job.out)} <= {*command_line(p)}]

    assert wait_until(judges), job.logs
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 0
    assert job.err.splitlines()[-1] == "rankscope: not judged yet: rankscope check trace"
    assert wait_until(lambda: not judges())


def test_with_the_variable_alone_the_verdict_is_said_on_a_terminal(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_STEPS": "all"}
    command = [sys.executable, "script.py", "nan"]
    controller, terminal = pty.openpty()
    said = {}
    for out, stderr in (("told", terminal), ("silent", subprocess.PIPE)):
        job = forked.Popen(
            command, cwd=tmp_path, env={**environ, "RANKSCOPE_OUT": out}, stderr=stderr, text=True
        )
        said[out] = (job.communicate(timeout=300)[1] or "").splitlines()
        assert job.returncode == 0
    os.close(terminal)
    told = os.read(controller, 1 << 16).decode().splitlines()
    verdict, where = checked(tmp_path / "told")
    assert told[-1] == f"rankscope: {verdict}; first: {where}: rankscope check {tmp_path / 'told'}"
    assert said["silent"][-1].startswith("rankscope: trace in ")
