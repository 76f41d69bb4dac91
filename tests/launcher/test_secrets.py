"""What is secret stays out of traces, logs and command lines: the command of `--rs-on-finding`, and
tokens among a script's arguments. That command itself: its time, its children, many findings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from tests import forked
from tests.launcher.launches import Launch, command_line, launching, pids
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("secrets"), installed]
SCRIPT = """
import pathlib, sys, time, torch
folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
(folder / "trained.0.0").touch()
while not (folder / "leave").exists():
    if (folder / "break").exists():
        with torch.no_grad():
            model[1].weight[0, 0] = float("nan")
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
if (folder / "raise").exists():
    raise ValueError("cannot reach https://me:T0ps3cr3tUrl@host")
"""
TOKEN, PAPER_TOKEN = "T0ps3cr3tHookToken", "T0ps3cr3tPaperToken"
PLAIN = ["train.py", "--lr", "0.1", "data.path=/data/token/set", "--max-tokens=512", "a=b@c"]
SECRET_WORDS = [
    "--token=T0ps3cr3t", "--api-key", "T0ps3cr3t", "--hubToken", "-T0ps3cr3t",
    "https://me:T0ps3cr3t@host/path", "https://T0ps3cr3t@host/path", "HF_TOKEN=T0ps3cr3t",
    "+wandb.api_key=T0ps3cr3t", "--env=DB_PASSWORD=T0ps3cr3t", '{"api_key": "a T0ps3cr3t"}',
    "https://host/?page=1&sig=T0ps3cr3t", "Authorization: Bearer T0ps3cr3t",
    "--password=a T0ps3cr3t", "https://hooks.slack.com/services/T0ps3cr3t/B1",
    "hf_T0ps3cr3tT0ps3cr3tT0ps3cr3t",
]  # fmt: skip


def showing(text: str) -> set[int]:
    """Return the processes whose command lines hold a text."""
    return {pid for pid in pids() if any(text.encode() in word for word in command_line(pid))}


def holding(folder: Path, text: str) -> list[Path]:
    """Return the files below a folder that hold a text."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and text.encode() in path.read_bytes():
            found.append(path)
    return found


def hook(folder: Path) -> str:
    """Return a command that waits, with a secret in it, until it is let go."""
    given, release = folder / "given", folder / "release"
    wait = f"while [ ! -e {release} ]; do sleep 0.1; done"
    return f"cat >> {given}; {wait}; echo done >> {given}.done # {TOKEN}"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, SCRIPT) as start:
        yield start(["x"], "--rs-steps", "all", "--rs-on-finding", hook(tmp_path))
        (tmp_path / "release").touch()


def test_the_command_for_findings_is_in_no_trace_and_on_no_command_line(
    job: Launch, tmp_path: Path
):
    job.trained()
    (job.meeting / "break").touch()
    given = tmp_path / "given"
    assert wait_until(lambda: given.exists() and given.read_text()), job.logs
    assert job.companion() and job.beside()
    assert showing(TOKEN) == {job.process.pid}  # the user's own words
    (rank,) = job.ranks()
    assert TOKEN.encode() not in Path(f"/proc/{rank}/environ").read_bytes()
    (header,) = holding(job.folder, TOKEN)
    assert header.name == "run.json" and header.stat().st_mode & 0o777 == 0o600
    (tmp_path / "release").touch()
    assert wait_until((tmp_path / "given.done").exists)
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs
    assert holding(job.folder, TOKEN) == []
    assert open_trace(job.out).run["settings"]["on-finding"] == "set"


@pytest.mark.lab
def test_with_the_variable_alone_it_is_in_no_trace_either_nor_are_tokens_of_the_script(
    tmp_path: Path,
):
    (tmp_path / "train.py").write_text(SCRIPT)
    (meeting := tmp_path / "meeting").mkdir()
    (meeting / "break").touch()
    (meeting / "raise").touch()
    out, given = tmp_path / "trace", tmp_path / "given"
    process = forked.Popen(
        [sys.executable, str(tmp_path / "train.py"), str(meeting), *PLAIN, *SECRET_WORDS],
        stdout=(tmp_path / "stdout").open("w"),
        stderr=(tmp_path / "stderr").open("w"),
        env={
            **os.environ,
            "RANKSCOPE": "1",
            "RANKSCOPE_OUT": str(out),
            "RANKSCOPE_SPOOL": str(tmp_path / "spool"),
            "RANKSCOPE_STEPS": "all",
            "RANKSCOPE_ON_FINDING": hook(tmp_path),
        },
    )
    try:
        assert wait_until(lambda: given.exists() and given.read_text())
        assert showing(TOKEN) == set()
        (header,) = holding(tmp_path, TOKEN)
        assert header.name == "run.json" and header.stat().st_mode & 0o777 == 0o600
    finally:
        (tmp_path / "release").touch()
        (meeting / "leave").touch()
        assert process.wait(300) == 1
    assert wait_until(lambda: (out / "trace.json").exists())
    run = open_trace(out).run
    assert run["settings"]["on-finding"] == "set"
    assert run["argv"][2 : 2 + len(PLAIN)] == PLAIN
    assert len(run["argv"]) == 2 + len(PLAIN) + len(SECRET_WORDS)
    assert "--api-key" in run["argv"] and "https://***@host/path" in run["argv"]
    assert [word for word in run["argv"] if "T0ps3cr3t" in word] == []
    assert holding(out, "T0ps3cr3t") == [] and holding(out, "cannot reach https://***@host")
