"""`rankscope capture`: the next steps of a running job are traced on all ranks, or it is said which
were not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rankscope.agent.steps.chosen import LEAD
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests import forked
from tests.launcher.launches import BIN, Launch, Start, kill, rankscope
from tests.launcher.ways import installed
from tests.noted import remarks
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("capture"),
    installed,
]

SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
folder, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
rank = dist.get_rank()
apart = words[rank] == "apart"
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
net = Net()
model = net if apart else torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(10**6):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    (folder / f"new.{rank}").write_text(str(step))
    (folder / f"new.{rank}").replace(folder / f"step.{rank}")
    pause = folder / (f"pause.{rank}" if apart else "pause")
    said = torch.tensor([float((folder / "go").exists()), float(pause.exists())])
    if not apart:
        dist.all_reduce(said)
    while said[1] and pause.exists():
        (folder / f"paused.{rank}").touch()
        time.sleep(0.005)
    if said[0]:
        break
    time.sleep(0.005)
dist.barrier()
"""
OPTIONS = ("--rs-steps", "0", "--rs-paths", "first")


def step_of(job: Launch, rank: int = 0) -> int:
    """The last step that a rank has ended."""
    path = job.meeting / f"step.{rank}"
    return int(path.read_text()) if path.exists() else -1


def is_at(job: Launch, step: int, rank: int = 0) -> bool:
    assert wait_until(lambda: step_of(job, rank) >= step), job.logs
    return True


def pause(job: Launch) -> None:
    """Hold all ranks back between two steps."""
    (job.meeting / "pause").touch()
    for rank in (0, 1):
        assert wait_until(lambda rank=rank: (job.meeting / f"paused.{rank}").exists()), job.logs


def has_records(job: Launch) -> bool:
    return any((job.out / "spool").glob("rank*.cells"))


def traced(out: Path) -> dict[int, dict[str, set[int]]]:
    """{train step: {module: ranks}} of a trace."""
    found: dict[int, dict[str, set[int]]] = {}
    for step in open_trace(out).steps:
        for node in step.walk():
            found.setdefault(step.step, {}).setdefault(node.path, set()).update(node.ranks)
    return found


def kept(trace: Trace) -> set[tuple[int, str, int]]:
    """(step, value, rank) of the full tensors of a trace."""
    return {
        (step.step, f"{node.path}:{view.slot}", rank)
        for step in trace.steps
        for node in step.walk()
        for view in node.slots
        for rank in view.references()
    }


def capture(job: Launch, *words: object) -> subprocess.CompletedProcess[str]:
    return rankscope("capture", job.out, "--seconds", 60, *words)


def test_the_next_steps_of_all_ranks_are_traced_with_what_is_asked_for(launch: Start):
    job = launch(["", ""])
    assert is_at(job, 5), "no step is left to trace"
    before = step_of(job)
    wide = capture(job, "--steps", 3, "--paths", "second", "--tensors", "second:output,f*:input*")
    assert wide.returncode == 0, (wide.stdout, wide.stderr, job.logs)
    after = step_of(job)
    plain = capture(job)
    assert plain.returncode == 0, (plain.stdout, plain.stderr, job.logs)
    (job.meeting / "go").touch()
    assert job.wait() == 0, job.logs
    found = traced(job.out)
    _, first, *_, last = sorted(found)
    assert [*sorted(found)] == [0, first, first + 1, first + 2, last]
    assert before < first <= after and first + 2 < last
    for step in range(first, first + 3):
        assert found[step]["first"] == found[step]["second"] == {0, 1}
    assert found[last]["first"] == {0, 1}
    assert "second" not in found[0] and "second" not in found[last], "for that order alone"
    assert f"there: train steps {first}-{first + 2} of ranks 0-1" in wide.stdout
    assert f"there: train step {last} of ranks 0-1" in plain.stdout
    assert f"--step {first}-{first + 2}" in wide.stdout
    trace = open_trace(job.out)
    assert kept(trace) == {
        (step, name, rank)
        for step in range(first, first + 3)
        for name in ("first:input.0", "second:output")
        for rank in (0, 1)
    }
    dumped = rankscope("tensor", job.out, "second:output", "--step", first, "--rank", 0, "--print")
    assert dumped.returncode == 0, dumped.stderr
    shown = rankscope("show", job.out, "--step", last)
    assert shown.returncode == 0 and f"step {last}" in shown.stdout
    assert open_trace(job.out).is_complete
    assert not any(remarks(step) for step in open_trace(job.out).steps)
    assert rankscope("check", job.out).returncode == 0
    over = capture(job)
    assert over.returncode == 2 and "the job is over" in over.stderr
    assert not job.spool.exists() or not any(job.spool.iterdir())


def test_an_order_stands_until_it_is_taken_and_no_second_one_beside_it(launch: Start):
    job = launch(["", ""])
    assert is_at(job, 3)
    pause(job)
    waited = capture(job, "--seconds", 0.1)
    assert waited.returncode == 1 and "no rank has taken the order" in waited.stdout
    again = capture(job)
    assert again.returncode == 2 and "an order stands already" in again.stderr
    assert "no rank has begun a step since" in again.stderr
    (job.meeting / "pause").unlink()
    assert is_at(job, step_of(job) + 2 * LEAD + 2)
    after = capture(job, "--no-wait")
    assert after.returncode == 0 and "rankscope show" in after.stdout, after.stderr
    asked = step_of(job)
    assert is_at(job, asked + 40)
    (job.meeting / "go").touch()
    assert job.wait() == 0, job.logs
    assert len(traced(job.out)) == 3


def test_an_order_ends_with_its_job(launch: Start):
    job = launch(["", ""])
    assert is_at(job, 3)
    pause(job)
    ordering = forked.Popen(
        [str(BIN / "rankscope"), "capture", str(job.out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_until(lambda: (job.out / "spool" / "order.json").exists())
    for pid in job.ranks():
        kill(pid)
    said, complained = ordering.communicate(timeout=120)
    assert ordering.returncode == 1, (said, complained)
    assert "the job ended before any rank took the order" in said
    job.wait()


def test_a_folder_that_no_job_writes_is_refused(tmp_path: Path, launch: Start):
    for folder, words in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "give the trace folder of a running job"),
    ):
        refused = rankscope("capture", folder)
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
    job = launch([""])
    assert is_at(job, 3) and wait_until(lambda: has_records(job))
    companion = job.companion()
    for pid in (job.process.pid, companion, *job.ranks()):
        kill(pid)
    job.process.wait(60)
    assert wait_until(lambda: not any(map(os.path.exists, (f"/proc/{companion}/exe",))))
    gone = rankscope("capture", job.out)
    assert gone.returncode == 2 and "the job is gone" in gone.stderr, gone.stderr
