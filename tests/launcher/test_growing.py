"""The tree of a job with many records grows while it runs: no kill costs a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from tests.launcher.launches import Launch, Start
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("growing"),
    installed,
]
SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(60))
    def forward(self, x):
        return sum(layer(x) for layer in self.layers)
model = Wide()
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
torch.manual_seed(1 + rank)
(folder / f"trained.0.{rank}").touch()
while True:
    over = torch.tensor([float((folder / "leave").exists())])
    dist.all_reduce(over)
    if over.item() == 2:
        break
    model(torch.randn(64, 4)).square().sum().backward()  # 64 sketches a value
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p) / 2)
        at += p.numel()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def parts(job: Launch) -> int:
    """How many parts are written."""
    try:
        return len((job.out / "steps/index.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def test_a_job_that_is_killed_as_a_whole_has_its_steps_at_once(launch: Start, tmp_path: Path):
    job = launch(["a", "b"], "--rs-steps", "all", "--rs-live-check", 0)
    job.trained()
    assert wait_until(lambda: parts(job) >= 1, 60.0), job.logs
    victims = [job.process.pid, job.beside(), job.companion()]
    for pid in (*job.ranks(), *filter(None, victims)):
        os.kill(pid, signal.SIGKILL)
    job.process.wait(60)
    trace = open_trace(job.out)
    assert not trace.is_written
    numbers = [step.step for step in trace.steps]
    assert numbers == list(range(len(numbers))) and len(numbers) > 20
    recover([job.out], tmp_path / "recovered")
    found = open_trace(tmp_path / "recovered")
    assert [step.step for step in found.steps] == numbers
    assert [n.id for n in found.steps[3].walk()] == [n.id for n in trace.steps[3].walk()]
