"""Jobs that end while their companion, its builder or their folder is stopped, killed or gone."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from rankscope.record.call import Mode
from rankscope.tree.reader import open_trace
from tests import forked
from tests.launcher.launches import (
    command_line,
    kill,
    pids,
    rankscope,
)
from tests.launcher.test_ends import (
    Start,
    all_there,
    ends,
    fill,
    is_empty,
    verified,
)
from tests.launcher.test_ends import launch as launch
from tests.launcher.test_ends import small_disk as small_disk
from tests.launcher.ways import installed
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("ends"),
    installed,
]


ENDS_OUTSIDE = """
import os, pathlib, signal, sys, time, torch
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that an agent sends once a first rank has failed
there = pathlib.Path(sys.argv[1])
(there / ("deaf." + os.environ["RANK"])).touch()
while len([*there.glob("deaf.*")]) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
from torch.distributed.elastic.multiprocessing.errors import record
def use(value): raise KeyError("outside a module")
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): raise ValueError("no such sample")
class Model(torch.nn.Linear):
    def forward(self, x):
        if len(x) == 1: raise ValueError("too small")
        return super().forward(x)
def caught(code):
    try: sys.exit(code)
    except SystemExit: pass
model, real_exit = Model(2, 2), sys.exit
def end(way):
    loss = model(torch.ones(2, 2)).sum()
    if way == "loss": use(loss)
    if way == "loader":
        try: [*torch.utils.data.DataLoader(Data(), num_workers=1)]
        finally: (there / "loaded").touch()
    # an agent that sees a failed rank sends SIGTERM to the loader's worker too
    while not (there / "loaded").exists(): time.sleep(0.01)
    if way == "exit":
        try: use(loss)
        except KeyError: sys.exit("no data")
    if way == "caught": caught(3); sys.exit(0)
    if way == "wrapped":
        try: model(torch.ones(1, 2))
        except ValueError as error: raise RuntimeError("step failed") from error
    if way == "forgiven":
        try: model(torch.ones(1, 2))
        except ValueError: pass
        use(loss)
(record(end) if sys.argv[2 + int(os.environ["RANK"])] == "loss" else end)(
    sys.argv[2 + int(os.environ["RANK"])])
"""


def test_what_ends_a_program_outside_of_its_modules_is_told_with_its_line(launch: Start):
    """An error of a data loader, a loss or a script is no module's: without its text a trace says
    no more than that a rank raised. An exit code other than 0 is one; an exit that the program
    caught is none."""
    ways = ["loss", "loader", "exit", "caught", "wrapped", "forgiven"]
    job = launch("job", ways, script=ENDS_OUTSIDE)
    assert job.wait() == 1
    report = verified(job.out)
    assert ends(report) == {**dict.fromkeys(range(6), "raised"), 3: "exit"}, job.err
    told = {each["rank"]: each for each in report["raised"]}
    key, small = "KeyError: 'outside a module'", "ValueError: too small"
    assert told[0]["error"] == told[5]["error"] == key
    assert [told[rank]["path"] for rank in (0, 1, 2, 4, 5)] == [None, None, None, "", None]
    assert told[1]["error"].startswith("ValueError: Caught ValueError in DataLoader worker")
    assert told[1]["error"].endswith("ValueError: no such sample")
    assert (told[2]["error"], told[2]["causes"]) == ("SystemExit: no data", [key])
    assert (told[4]["error"], told[4]["causes"]) == (small, [small])
    places = {rank: told[rank]["where"].split()[1] for rank in told}
    assert places == {0: "use", 1: "end", 2: "use", 4: "end", 5: "use"}
    assert "Traceback" in job.err and "rankscope/agent" not in job.err
    said = rankscope("verify", job.out).stdout
    assert f"raised: {key}, outside of any module's call, at script.py:8 use" in said
    assert "SystemExit: no data, after KeyError" in said
    checked = json.loads(rankscope("check", job.out, "--json").stdout)["result"]
    crashed = [f for f in checked["findings"] if f["kind"] == "crash" and f["origin"]]
    said_of = {tuple(f["ranks"]): f["message"] for f in crashed}
    # ranks 0 and 5 raised one exception at one line: that is told once
    assert sorted(said_of) == [(0, 5), (1,), (2,), (4,)]
    assert "outside of any module's call, at script.py:8 use" in said_of[0, 5]


ENDS_IN_HOOKS = """
import os, pathlib, signal, sys, time, torch
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that an agent sends once a first rank has failed
there = pathlib.Path(sys.argv[1])
(there / ("deaf." + os.environ["RANK"])).touch()
while len([*there.glob("deaf.*")]) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
def refuse(module, args, output): raise ValueError("no such output")
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    def forward(self, x):
        try: x = self.fc(x)
        except ValueError:
            if way != "forgiven": raise
        if way == "forgiven": raise KeyError("later")
        return self.last(x)
way = sys.argv[2 + int(os.environ["RANK"])]
model = torch.nn.Sequential(Block())
hooked = {"root": model, "block": model[0]}.get(way, model[0].fc)
hooked.register_forward_hook(refuse)
model(torch.ones(2, 2))
"""


def test_an_exception_of_a_forward_hook_is_told_of_the_module_that_has_the_hook(launch: Start):
    job = launch("job", ["child", "block", "root", "forgiven"], script=ENDS_IN_HOOKS)
    assert job.wait() == 1
    report = verified(job.out)
    told = {each["rank"]: (each["path"], each["error"]) for each in report["raised"]}
    no = "ValueError: no such output"
    assert told == {0: ("0.fc", no), 1: ("0", no), 2: ("", no), 3: ("0", "KeyError: 'later'")}
    checked = json.loads(rankscope("check", job.out, "--json").stdout)["result"]
    crashed = [(f["path"], *f["ranks"]) for f in checked["findings"] if f["kind"] == "crash"]
    assert sorted(crashed) == [("", 2), ("0", 1), ("0", 3), ("0.fc", 0)]


def test_a_companion_that_was_held_up_before_any_rank_traced_is_waited_for(launch: Start):
    """As on a machine that is short of memory: it says hello, then nothing for seconds."""
    job = launch("job", ["import", "exit"])  # the first keeps the job going
    log = job.out / "collector.log"
    assert wait_until(lambda: log.exists() and "writing run" in log.read_text()), job.err
    companion = job.companion()
    kill(companion, signal.SIGSTOP)
    time.sleep(7)
    kill(companion, signal.SIGCONT)
    assert wait_until(lambda: any((job.out / "spool").glob("*.cells"))), job.logs
    assert wait_until(lambda: len(job.ranks()) == 1), job.logs  # the other has left by itself
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 1
    assert "incomplete: rankscope verify trace" in job.last_line, job.logs
    report = verified(job.out)
    assert ends(report) == {1: "exit"}
    assert all_there(report)


def test_a_builder_of_the_tree_that_is_stopped_for_good_is_replaced(launch: Start):
    job = launch("job", ["exit"])

    def builder() -> int:
        words = {b"--build-tree", os.fsencode(job.out)}
        return next((pid for pid in pids() if words <= {*command_line(pid)}), 0)

    assert wait_until(builder), job.logs
    stopped = builder()
    kill(stopped, signal.SIGSTOP)
    assert job.wait() == 0
    assert job.last_line == f"rankscope: trace in {job.out}; read it: rankscope show trace"
    assert verified(job.out)["status"] == "clean"
    assert stopped not in pids()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_killed_at_any_moment_of_a_job_loses_nothing_it_committed(launch: Start, seed: int):
    chosen = random.Random(seed)
    job = launch("job", ["wait", "wait"], "--rs-steps", "all")
    job.trained()
    victims = ["rank", "companion", "companion"]
    chosen.shuffle(victims)
    for victim in victims:
        time.sleep(chosen.uniform(0.0, 0.4))
        kill(chosen.choice(job.ranks()) if victim == "rank" else job.companion())
        if victim == "rank":
            break
    assert job.wait() == 1
    report = verified(job.out)
    assert set(ends(report).values()) == {"lost"}
    assert all_there(report)
    found = [step for step in open_trace(job.out).steps if step.mode is Mode.TRAIN]
    assert [step.step for step in found] == [*range(len(found))]
    for rank in (0, 1):
        confirmed = int((job.meeting / f"steps.{rank}").read_text() or 0)
        seen = sum(any(rank in node.ranks for node in step.nodes) for step in found)
        assert seen >= confirmed
    assert is_empty(job.spool)


def test_a_trace_folder_that_is_removed_while_the_job_runs_ends_its_companion(launch: Start):
    """Another run may stand in that place by then: nothing is written there any more."""
    job = launch("removed", ["wait", "wait"], "--rs-finish-seconds", 30)
    job.trained()
    companion = job.companion()
    # files come and go in it meanwhile
    assert wait_until(lambda: shutil.rmtree(job.out, ignore_errors=True) or not job.out.exists(), 9)
    assert wait_until(lambda: job.companion() != companion, 60), "it goes on for nobody"
    job.go()
    began = time.monotonic()
    assert job.wait() == 0, job.logs
    assert time.monotonic() - began < 25, "nobody waits for a tree that will not come"
    assert "no tree in" in job.err, job.err
    assert not job.companion() and not job.out.exists()


KILLS_ITS_COMPANION = """
import os, pathlib, signal, sys, torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
(started,) = pathlib.Path(os.environ["RANKSCOPE_SPOOL"]).glob("*/*/companion.started")
os.kill(int(started.read_text().split()[0].split(":")[0]), signal.SIGKILL)
"""


def test_a_companion_that_is_killed_before_a_script_ends_is_started_once_more(tmp_path: Path):
    """Nobody waits for one that is known to be dead, and the tree is there all the same."""
    (tmp_path / "script.py").write_text(KILLS_ITS_COMPANION)
    places = {"RANKSCOPE_OUT": str(tmp_path / "out"), "RANKSCOPE_SPOOL": str(tmp_path / "spool")}
    job = forked.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RANKSCOPE": "1", "RANKSCOPE_FINISH_SECONDS": "100", **places},
    )
    assert job.returncode == 0, job.stderr
    assert f"trace in {tmp_path / 'out'}" in job.stderr, job.stderr
    assert all_there(verified(tmp_path / "out"))
    assert is_empty(tmp_path / "spool")


ONE_STEP = """
import torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
"""


def test_every_host_of_a_job_says_that_the_disk_under_their_shared_folder_is_full(
    launch: Start, small_disk: Path
):
    fill(small_disk / "ballast")
    common = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    common += ["--rs-finish-seconds", 600]
    how = {"out": str(small_disk / "trace"), "script": ONE_STEP}
    hosts = [launch(f"host{n}", ["trains"], *common, "--node-rank", n, **how) for n in range(2)]
    assert [host.wait() for host in hosts] == [0, 0]
    run_folders = []
    for host in hosts:
        (folder,) = host.spool.glob("*/*")
        assert host.last_line.startswith(f"rankscope: no tree in {host.out}")  # or its sibling:
        assert ": its disk is full" in host.last_line  # no mark of the run can be left there
        assert f"rankscope recover {folder.relative_to(host.folder)} {host.out}" in host.last_line
        run_folders.append(folder)
    made = rankscope("recover", *run_folders, "--out", hosts[0].folder / "made")
    assert made.stdout.splitlines()[0].endswith("2 of 2 ranks, complete"), made.stderr
    assert all(is_empty(host.spool) for host in hosts)
