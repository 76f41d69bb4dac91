"""`diff` of runs of which some ranks are unknown: not traced, or broken off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rankscope
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Report
from tests import forked
from tests.launcher.launches import BIN

pytestmark = pytest.mark.launch
SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
rank, end = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)

class Doubled(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2 and rank == 1 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2

model = nn.Sequential(nn.Linear(8, 8), Doubled(), nn.Linear(8, 8))
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(step * 2 + rank)
    loss = wrapped(torch.randn(4, 8)).square().sum()
    if step == 1 and rank == 1 and end == "raised":
        raise RuntimeError("out of luck")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()  # else threads of gloo may end the process with SIGABRT
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with the traces `whole`, `killed`, `second` (of rank 1 alone), in lab `raised`."""
    folder = tmp_path_factory.mktemp("lost")
    (folder / "script.py").write_text(SCRIPT)
    more = ("raised",) if request.config.getoption("lab") else ()
    for name in ("whole", "killed", "second", *more):
        options = ["--rs-ranks", "1"] if name == "second" else []
        command = [BIN / "rankscope", "run", "--rs-out", name, "--rs-drain-seconds", 1, *options]
        done = forked.run(
            [*map(str, command), "--nproc-per-node", "2", str(folder / "script.py"), name],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ},
        )
        assert (done.returncode == 0) is (name in ("whole", "second")), done.stderr
    return folder


def compared(folder: Path, ref: str, test: str) -> Report:
    return rankscope.diff(rankscope.open_trace(folder / ref), rankscope.open_trace(folder / test))


@pytest.mark.parametrize("end", ["killed", pytest.param("raised", marks=pytest.mark.lab)])
def test_a_run_that_broke_off_is_no_difference_and_not_clean(traces: Path, end: str) -> None:
    for pair in ((end, "whole"), ("whole", end)):
        report = compared(traces, *pair)
        assert report.findings == ()
        assert report.verdict.value == "incomplete"
        assert "broke off" in report.lacks
        assert "rank 1 " in report.lacks or "ranks 0-1 " in report.lacks
        reasons = {skipped.reason: skipped.count for skipped in report.skipped}
        assert reasons["not all of its ranks came here before the run broke off"] > 0
        assert report.compared > 20
        is_said = any("rank 1 raised RuntimeError: out of luck" in note for note in report.notes)
        assert is_said is (end == "raised")


def test_a_trace_of_some_ranks_is_held_to_one_of_the_same_ranks_alone(traces: Path) -> None:
    for pair, name in ((("whole", "second"), "TEST"), (("second", "whole"), "REF")):
        report = compared(traces, *pair)
        assert (report.findings, report.compared) == ((), 0)
        assert report.verdict.value == "incomplete"
        assert report.lacks.startswith(f"rank 0 of 2 was not traced in {name}: ")
    report = compared(traces, "second", "second")
    assert report.verdict.value == "clean"
    assert report.compared == report.recorded


def test_a_layout_file_for_another_number_of_ranks_is_not_used(traces: Path) -> None:
    file = traces / "layout.toml"
    file.write_text('axes = "tp=4"\n')
    whole = rankscope.open_trace(traces / "whole")
    report = rankscope.diff(whole, whole, layouts=LayoutFile.load(file))
    assert report.verdict.value == "clean"
