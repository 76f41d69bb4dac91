"""`--rs-steps last:N` on several hosts, without a launcher, on accelerators and full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.lab.lateaccelerator import why_not
from tests.launcher.launches import Start, kill, launching, rankscope
from tests.launcher.test_blackbox import OPTIONS as OPTIONS
from tests.launcher.test_blackbox import SCRIPT as SCRIPT
from tests.launcher.test_blackbox import (
    check,
    is_removed,
    kinds,
    nothing_lost,
    replicated_steps,
    steps_of,
    told,
)
from tests.launcher.ways import installed
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("blackbox"),
    installed,
]


ROOT = Path(__file__).parents[3]


CALM = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 2)
        self.loss = torch.nn.MSELoss()
        self.extra = torch.nn.Identity() if rank else None  # only some ranks have it
        self.exact = torch.nn.Linear(1, 1, bias=False)  # found to the last digit
        self.exactly = torch.nn.MSELoss()
        self.penalty = torch.nn.Identity()
    def forward(self, x, y, step):
        out = self.head(self.body(x))
        if self.extra is not None:
            out = self.extra(out)
        one = torch.ones(1, 1)
        loss = self.loss(out, y) + self.exactly(self.exact(one), (2 if step < 100 else 2.001) * one)
        return loss + self.penalty(out.square().mean() * (step % 10 == 3))
class Difference(torch.nn.Module):
    def forward(self, a, b):
        return a - b
model, sign = Model(), Difference()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=150)
torch.manual_seed(rank)
for step in range(150):
    for _ in range(1 + step % 3):  # micro-batches
        x = torch.randn(2 + step % 7, 4) * (20 if step % 8 == 4 else 1)  # two sets in turn
        loss = wrapped(x, x[:, :2].tanh(), step)
        loss.backward()
        sign(loss, 0.9 * loss.detach() + torch.rand(()) * 0.2 * loss.detach())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            for scale in (1.0, 1e4):  # two sets of another kind
                wrapped(scale * torch.randn(16, 4), torch.zeros(16, 2), step)
        model.train()
"""


LATE = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from tests.lab.lateaccelerator import install
install()
from tests.lab.lateaccelerator.streams import work
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
model.to("late")
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    x = torch.randn(3, 4) * (1e6 if step == 20 else 1.0)
    loss = model(x.to("late", non_blocking=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 2:  # until then the device has done nothing
        loss.item()
waits = [wait for wait in work.synchronizations if wait.is_of_rankscope]
pathlib.Path(sys.argv[1], "waits").write_text(repr(waits))
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_an_accelerator_that_is_steps_behind_is_not_waited_for(tmp_path: Path):
    """What leaps is known when the digest comes back, and told of the step of its call."""
    with launching(tmp_path, LATE, *OPTIONS) as start:
        job = start(["-"], "--rs-steps", "last:4,watch:0:output")
        assert job.wait() == 0, job.logs
    assert (job.meeting / "waits").read_text() == "[]"
    ((step, text),) = told(job.out)
    assert step == 20 and "root mean square of 0:output" in text and "in step 20" in text
    assert {16, 17, 18, 19, 20} == {*steps_of(job.out)}
    assert nothing_lost(job.out)


def test_right_programs_in_which_all_values_are_watched_write_nothing(tmp_path: Path):
    """Warm-up, micro-batches, sets of other sizes in turn, eval steps, a loss that goes to nothing,
    one that changes its sign, a penalty in some steps, a module that not every rank has."""
    with launching(tmp_path, CALM, *OPTIONS) as start:
        job = start(
            ["-", "-"],
            "--rs-steps",
            "last:4,watch:**,watch:lo:output,watch:@Difference:output,watch:extra:output",
        )
        assert job.wait() == 0, job.logs
    assert "no gradient norm leapt, no watched value leapt" in job.last_line, told(job.out)
    assert not job.out.exists()
    assert job.err.count("took nothing") == 1, job.err
    assert "watch:lo:output took nothing in 16 steps" in job.err


def test_a_job_that_stands_still_has_its_last_steps_in_the_trace_while_it_stands(launch: Start):
    job = launch(["none", "wait@20"], *OPTIONS, "--rs-stall-seconds", 2)
    assert wait_until(lambda: " has moved since " in job.err), job.err
    # the records come by themselves: no rank does anything
    assert wait_until(lambda: {16, 17, 18} <= replicated_steps(job.out)), job.logs
    assert wait_until(lambda: "hang" in kinds(check(job.out))), check(job.out)
    for pid in job.ranks():
        kill(pid, signal.SIGKILL)
    job.wait()
    found = steps_of(job.out)
    assert {16, 17, 18, 19} <= {*found} <= {15, 16, 17, 18, 19, 20}, sorted(found)
    texts = [text for _, text in told(job.out)]
    assert any("stood still" in text for text in texts), texts


def test_a_copy_that_cannot_be_made_is_named_and_its_records_stay(launch: Start):
    """Rank 1's: a file stands where it is drafted, which no relay can remove."""
    job = launch(["wait@10", "nan@20"], *OPTIONS, "--rs-finish-seconds", 2)
    assert wait_until(lambda: (job.meeting / "waiting.0").exists()), job.err
    (run_folder,) = (path.parent for path in job.spool.glob("*/*/held"))
    (run_folder / "rank00001.0").mkdir()
    (run_folder / "rank00001.0/draft").touch()
    job.go()
    assert job.wait() == 0, job.logs
    assert "nothing happened" not in job.last_line
    assert wait_until(lambda: (job.out / "trace.json").exists()), job.logs
    assert {step for step, ranks in steps_of(job.out).items() if 0 in ranks} == {*range(16, 21)}
    assert rankscope("verify", job.out).returncode == 1
    assert wait_until(lambda: not job.companion()), job.logs
    (run_folder / "rank00001.0/draft").unlink()
    done = rankscope("recover", run_folder, job.out, "--out", job.folder / "whole")
    assert done.returncode == 0, done.stderr
    assert steps_of(job.folder / "whole") == {step: {0, 1} for step in range(16, 21)}
    assert is_removed(job.spool), job.logs


def test_without_a_launcher_the_trace_comes_all_the_same(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "meeting").mkdir()
    said = {}
    for way in ("none", "nan@20"):
        environment = {
            **os.environ,
            "RANKSCOPE": "1",
            "RANKSCOPE_OUT": str(tmp_path / way),
            "RANKSCOPE_STEPS": "last:4",
            "RANKSCOPE_SPOOL": str(tmp_path / "spool"),
        }
        command = [
            Path(sys.executable).parent / "torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        done = forked.run(
            [*map(str, command), str(tmp_path / "script.py"), str(tmp_path / "meeting"), way, "-"],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        said[way] = done.stderr
    assert "nothing happened, so there is no trace" in said["none"]
    assert not [*(tmp_path / "none").glob("*")]
    assert wait_until(lambda: (tmp_path / "nan@20" / "trace.json").exists()), said
    assert {*steps_of(tmp_path / "nan@20")} == {16, 17, 18, 19, 20}


@pytest.mark.parametrize("way", ["none", "raise@20"])
def test_hosts_of_one_job_agree_without_a_word_between_them(tmp_path: Path, way: str):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "meeting").mkdir()
    port = free_port()
    hosts = [
        forked.Popen(
            [str(Path(sys.executable).parent / "rankscope"), "run", *OPTIONS]
            + ["--rs-steps", "last:4,watch:**:output"]
            + ["--rs-out", str(tmp_path / "trace"), "--rs-spool", str(tmp_path / f"spool{node}")]
            + ["--rs-drain-seconds", "2", "--nnodes", "2", "--node-rank", str(node)]
            + ["--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1"]
            + [str(tmp_path / "script.py"), str(tmp_path / "meeting"), "none", way],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [host.communicate(timeout=300)[1] for host in hosts]
    out = tmp_path / "trace"
    if way == "none":
        assert [host.returncode for host in hosts] == [0, 0], said
        assert "nothing happened, so there is no trace" in said[0]
        assert not [*out.glob("*")]
    else:
        assert wait_until(lambda: (out / "trace.json").exists()), said
        found = steps_of(out)
        assert all(found[step] == {0, 1} for step in range(16, 20)), (found, said)
    assert wait_until(lambda: all(is_removed(tmp_path / f"spool{node}") for node in range(2))), said
