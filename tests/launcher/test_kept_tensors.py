"""Full tensors kept by a job of two ranks, however it ends: training is unharmed, every finished
tensor is readable, what is not there is said.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests import forked
from tests.launcher.launches import BIN, Launch, kill, rankscope
from tests.tree.jobs import read_valid
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("kept")]

SCRIPT = """
import hashlib, os, pathlib, sys, time
import torch
rank = int(os.environ["RANK"])
filler = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None
ready = pathlib.Path(sys.argv[0]).parent
def wait_for(name):
    deadline = time.monotonic() + 100
    while filler and not (ready / name).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
torch.manual_seed(rank)
layers = torch.nn.Linear(64, 64), torch.nn.ReLU(inplace=True), torch.nn.Linear(64, 8)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses = []
for step in range(6):
    if step == 3 and filler:
        (ready / f"half.{rank}").touch()
        wait_for("half.0"), wait_for("half.1")
        if rank == 0:
            try:
                with filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            except OSError:
                (ready / "full").touch()
        wait_for("full")
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
(ready / f"done.{rank}").touch()
if filler and rank == 0:
    wait_for("done.1")
    filler.unlink(missing_ok=True)
final = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
sys.stdout.write(" ".join([str(rank), *losses, final.hexdigest()]) + "\\n")
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of eight MB; skipped where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def plainly(script: Path, rank: int) -> str:
    """Run one rank by itself, untraced; return what it printed."""
    done = forked.run(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "RANK": str(rank)},
    )
    return done.stdout.strip()


def all_kept(trace: Trace) -> dict[int, int]:
    """Open every tensor that a value refers to; return by rank how many values do."""
    columns, counts = trace.columns(), dict[int, int]()
    for rank, life, reference in zip(
        *(columns[f"values.{name}"].tolist() for name in ("rank", "incarnation", "reference"))
    ):
        if reference:
            assert trace.tensor_files.find(rank, life, reference).is_intact
            counts[rank] = counts.get(rank, 0) + 1
    return counts


def notes_of(trace: Trace) -> dict[int, list[str]]:
    return {rank["rank"]: rank.get("tensors", []) for rank in trace.completeness["ranks"]}


def test_a_killed_rank_leaves_every_recorded_tensor_readable_and_its_chunk_is_finished(tmp_path):
    job = Launch(tmp_path / "job", ["wait", "wait"], "--rs-steps", "all", "--rs-tensors", "**")
    try:
        job.trained()
        chunks = [job.out / f"tensors/rank0000{rank}/000001.safetensors" for rank in (0, 1)]
        assert wait_until(lambda: min(chunk.stat().st_size for chunk in chunks) > (1 << 20) + 5000)
        assert wait_until(lambda: len(all_kept(open_trace(job.out, wait_s=0))) == 2)  # it runs
        victim = next(p for p in job.ranks() if _rank_of(p) == 1)
        kill(victim)
        assert job.wait() == 1
    finally:
        job.stop()
    trace = open_trace(job.out)
    counts = all_kept(trace)
    steps = int((job.meeting / "steps.1").read_text())
    assert min(counts[0], counts[1]) > 10 * steps
    for rank, notes in notes_of(trace).items():
        (note,) = notes
        assert f"tensors/rank0000{rank}/000001.safetensors: was left unfinished with" in note
    columns = trace.columns()
    assert not (columns["values.flags"] & 8192).any()
    of_tensors = columns["values.rank"][columns["values.flags"] & 128 == 0]  # others are notes
    assert [*counts.values()] == [(of_tensors == rank).sum() for rank in counts]
    assert trace.tensor_files.problems() == []
    assert "was left unfinished" in rankscope("verify", job.out).stdout


def _rank_of(pid: int) -> int:
    found = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else -1


def test_a_disk_that_fills_harms_nothing_and_what_was_finished_is_readable(tmp_path, small_disk):
    (tmp_path / "job").mkdir()
    script, out = tmp_path / "job/script.py", small_disk / "trace"
    script.write_text(SCRIPT)
    words = [
        BIN / "rankscope", "run", "--rs-out", out, "--rs-steps", "all", "--rs-tensors", "**",
        "--rs-spool", tmp_path / "spool", "--nproc-per-node", 2, script, small_disk / "filler",
    ]  # fmt: skip
    done = forked.run([*map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [plainly(script, 0), plainly(script, 1)]
    said = done.stderr
    assert "tensors are not kept: " in said and "No space left on device" in said
    trace = open_trace(out)
    assert trace.is_complete, trace.completeness
    counts = all_kept(trace)
    columns = trace.columns()
    flags, ranks = columns["values.flags"], columns["values.rank"]
    for rank in (0, 1):
        missed = int(((flags & 8192 != 0) & (ranks == rank)).sum())
        assert counts[rank] > 50 and missed > 50
        notes = " ".join(notes_of(trace)[rank])
        assert "were not kept: " in notes and "No space left on device" in notes
    slots = read_valid(out)["steps"][-1]["nodes"][0]["slots"]
    last = next(slot for slot in slots if not slot["slot"].startswith("form:"))
    assert last["not_kept"] == "0-1" and "kept" not in last
