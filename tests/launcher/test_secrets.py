"""What is secret stays out of traces, logs and command lines: the command of `--rs-on-finding`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
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
