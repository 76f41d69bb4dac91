"""Jobs for the tests of `rankscope top`: real gloo ranks, slow ones, stuck ones, killed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launcher.launches import Launch

SCRIPT = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
folder, ways = pathlib.Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
rank = dist.get_rank()
way, *where = ways[rank].split("@")
missed = [int(number) for number in where] or [3, 0]
class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        if way == "slow":
            time.sleep(0.15)
        if way == "skips" and [step, self.number] == missed:
            (folder / "skipped").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        y = self.linear(x)
        total = y.detach().clone()
        dist.all_reduce(total)
        return y + total
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(0), Layer(1)])
        self.head = torch.nn.Linear(4, 1)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for step in range(2000):
    model(torch.ones(2, 4) * (rank + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    (folder / f"ended.{rank}").write_text(str(step))
    if way == "dies" and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    agreed = torch.tensor(float((folder / "leave").exists()))
    dist.all_reduce(agreed)
    if agreed:
        break
    time.sleep(0.05)
"""
"""`SCRIPT FOLDER WAY...`, one way for each rank: trains until `leave` is in FOLDER. A `slow` rank
takes longer in each layer, one that `skips@STEP@LAYER` does not come to a collective before `go` is
there, one that `dies` kills itself behind step 3."""


@contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Launch]]:
    """Give a function that starts a job, `start(ways, options...)`, with every step traced; end
    what is left of them."""
    started: list[Launch] = []

    def start(ways: list[str], *options: object) -> Launch:
        options = ("--rs-steps", "all", *options)
        started.append(Launch(folder / f"job{len(started)}", ways, *options, script=SCRIPT))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.stop()
