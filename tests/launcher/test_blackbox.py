"""`--rs-steps last:N`: nothing is kept of a job in which nothing happened; else the last steps of
all ranks are the trace."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from rankscope.record.call import Mode
from rankscope.spool.recordformat import RecordKind
from rankscope.tree.reader import open_trace
from tests.launcher.launches import Start, kill, rankscope
from tests.launcher.ways import installed
from tests.spool.streams import open_replica
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("blackbox"),
    installed,
]

SCRIPT = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
folder, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
rank = dist.get_rank()
way, _, at = words[rank].partition("@")
at = int(at or 0)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(1 + rank)
for step in range(40):
    x = torch.randn(2 + step % 3, 4)
    if step == at and way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == at and way == "raise":
        raise ValueError("on purpose")
    if step == at and way == "nan":
        with torch.no_grad():
            model.module[0].weight[0, 0] = float("nan")
    while step == at and way == "wait" and not (folder / "go").exists():
        (folder / f"waiting.{rank}").touch()
        time.sleep(0.01)
    if step == at and way == "bulge":
        x = x * 1e6  # what comes of it is bounded: the gradients are as they were
    loss = model(x).square().mean()
    if step == at and way == "leap":
        loss = loss * 1e6
    dist.all_reduce(loss.detach().clone())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == at and way == "wait":
        (folder / f"passed.{rank}").touch()
os.write(1, f"{rank} {loss.item().hex()}\\n".encode())
"""
OPTIONS = ("--rs-steps", "last:4", "--rs-spool-bytes", "8M")


def steps_of(out: Path) -> dict[int, set[int]]:
    """The ranks of each train step of a trace."""
    found: dict[int, set[int]] = {}
    for step in open_trace(out).steps:
        assert step.mode is Mode.TRAIN
        for node in step.walk():
            found.setdefault(step.step, set()).update(node.ranks)
    return found


def told(out: Path) -> list[tuple[int, str]]:
    """What happened, and at which step, as the trace notes it."""
    return [
        (step.step, str(each.note).removeprefix("black box: "))
        for step in open_trace(out).steps
        for each in step.notes
        if str(each.note).startswith("black box: ")
    ]


def check(out: Path) -> dict[str, Any]:
    done = rankscope("check", out, "--json")
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)["result"]
    return report


def kinds(report: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in report["findings"]}


def nothing_lost(out: Path) -> bool:
    done = rankscope("verify", out, "--json")
    return all(
        rank["committed"] == rank["received"] and not rank["dropped"] and not rank["gaps"]
        for rank in json.loads(done.stdout)["result"]["ranks"]
    )


def is_removed(spool: Path) -> bool:
    return not spool.exists() or not any(spool.iterdir())


def test_a_job_in_which_nothing_happens_writes_nothing_and_trains_the_same(launch: Start):
    job = launch(["wait@30", "none"])
    assert wait_until(lambda: (job.meeting / "waiting.0").exists()), job.err
    held = [path for path in job.out.rglob("*") if path.suffix == ".cells"]
    assert not held, "sent before anything happened"
    job.go()
    assert job.wait() == 0, job.logs
    assert "nothing happened, so there is no trace" in job.last_line
    assert not job.out.exists()
    assert is_removed(job.spool), job.logs
    plain = launch(["none", "none"], "--rs-steps", "100000")
    assert plain.wait() == 0, plain.logs
    assert sorted(job.stdout.split("\n")) == sorted(plain.stdout.split("\n"))


@pytest.mark.parametrize(
    "way", ["kill", "nan", *(pytest.param(way, marks=pytest.mark.lab) for way in ("raise", "leap"))]
)
def test_the_steps_before_it_of_all_ranks_are_the_trace(launch: Start, way: str):
    at = random.randrange(15, 36)
    job = launch(["none", f"{way}@{at}", "none"])
    code = job.wait()
    assert (code == 0) == (way in ("nan", "leap")), job.logs
    found = steps_of(job.out)
    before = range(at - 4, at)
    assert {*before} <= found.keys(), (at, sorted(found), told(job.out))
    assert all(found[step] == {0, 1, 2} for step in before), found
    assert min(found) >= at - 5, "more than was asked for"
    assert max(found) <= (at if way != "leap" else 39)
    assert nothing_lost(job.out)
    ((step, text), *_) = told(job.out)
    assert "black box: " in rankscope("show", job.out).stdout
    words = {
        "kill": "killed, or gone without a word",
        "raise": "raised",
        "nan": "is not finite",
        "leap": "gradient norm",
    }
    # peers raise at once where one is killed, and its process is there until torchrun reaps it
    is_of_peer = way == "kill" and "raised" in text
    assert words[way] in text or is_of_peer, (step, text)
    # a rank that is gone before the first call of a step never began it
    assert step in ((at - 1, at) if way in ("kill", "raise") else (at,))
    found_kinds = kinds(check(job.out))  # peers wait for one that is gone
    assert found_kinds <= {"crash", "hang", "nonfinite-origin"}
    assert bool(found_kinds) == (way != "leap")
    assert is_removed(job.spool), job.logs


def test_the_steps_before_a_watched_value_leaps_are_the_trace(launch: Start):
    """Nothing else happens in that job: without a watched value there is no trace of it."""
    at = random.randrange(15, 36)
    job = launch(["none", f"bulge@{at}", "none"], "--rs-steps", "last:4,watch:0:output")
    assert job.wait() == 0, job.logs
    found = steps_of(job.out)
    assert {*found} == {*range(at - 4, at + 1)}, (at, sorted(found), told(job.out))
    assert all(ranks == {0, 1, 2} for ranks in found.values()), found
    assert nothing_lost(job.out)
    ((step, text),) = told(job.out)
    assert step == at
    assert text.startswith("rank 1: the root mean square of 0:output is ")
    assert f" in step {at}, " in text and " times its running median " in text
    assert "black box: rank 1: " in rankscope("show", job.out).stdout
    assert not kinds(check(job.out))
    assert is_removed(job.spool), job.logs
    plain = launch(["none", f"bulge@{at}", "none"])
    assert plain.wait() == 0, plain.logs
    assert "nothing happened, so there is no trace" in plain.last_line
    assert sorted(job.stdout.split("\n")) == sorted(plain.stdout.split("\n"))


def replicated_steps(out: Path) -> set[int]:
    """Train steps whose records have come, to their end, of both ranks."""
    found: list[set[int]] = []
    for path in (out / "spool").glob("*.cells"):
        rows = open_replica(path).columns(RecordKind.STEP)[1]
        found.append({int(step) for step in rows["step"][rows["event"] == 1]})
    return set.intersection(*found) if len(found) == 2 else set()


def test_a_touch_asks_for_the_steps_before_it(launch: Start, tmp_path: Path):
    file = tmp_path / "now"
    file.touch()
    job = launch(["wait@20", "none"], "--rs-steps", f"last:4,at:{file}")
    assert wait_until(lambda: (job.meeting / "waiting.0").exists()), job.err
    file.touch()
    assert wait_until(lambda: len(replicated_steps(job.out)) >= 3), job.logs
    job.go()
    assert job.wait() == 0, job.logs
    found = steps_of(job.out)
    assert {16, 17, 18, 19} <= {*found} <= {15, 16, 17, 18, 19, 20}, sorted(found)
    assert all(ranks == {0, 1} for ranks in found.values()), found
    ((_, text),) = told(job.out)
    assert [each.partition("black box: ")[2] for each in open_trace(job.out).happened] == [text]
    assert any(text in note for note in check(job.out)["notes"])
    assert f"{file} was touched" in text
    assert nothing_lost(job.out)


def test_a_killed_companion_goes_on_with_the_black_box(launch: Start):
    job = launch(["wait@20", "kill@30"])
    assert wait_until(lambda: (job.meeting / "waiting.0").exists()), job.err
    first = job.companion()
    kill(first, signal.SIGKILL)
    assert wait_until(lambda: job.companion() not in (0, first)), job.logs
    job.go()
    job.wait()
    found = steps_of(job.out)
    assert {26, 27, 28, 29} <= {*found} <= {*range(25, 31)}, sorted(found)
    assert nothing_lost(job.out)


def test_what_cannot_be_held_back_is_refused(launch: Start):
    for options, words in (
        (("--rs-steps", "last:4,0-2"), "holds steps back and sends others"),
        (("--rs-steps", "last:0"), "positive number of steps"),
        (("--rs-steps", "spike:5"), "which only last:N waits for"),
        (("--rs-steps", "0-2,watch:0:output"), "which only last:N waits for"),
        (("--rs-steps", "last:4,watch:"), "wants a value, path:slot, like watch:lm_head:output"),
        (("--rs-steps", "last:4,watch:0:output,1:output"), "like watch:1:output"),
        (("--rs-steps", "last:4,watch:0:output,spike:0"), "leave spike:0 out"),
        (("--rs-steps", "last:4,watch:0", "--rs-digest", "none"), "looks at numbers"),
        (("--rs-steps", "last:4", "--rs-tensors", "**"), "full tensors are not held back"),
        (("--rs-steps", "last:4", "--rs-spool-bytes", "512K"), "--rs-spool-bytes 1M or more"),
    ):
        job = launch(["none"], *options)
        assert job.wait() == 2
        assert words in job.err, job.err


def test_what_is_held_is_recovered_where_nobody_is_left_to_send_it(launch: Start, tmp_path: Path):
    job = launch(["none", "wait@20"])
    assert wait_until(lambda: (job.meeting / "waiting.1").exists()), job.err
    (run_folder,) = job.spool.glob("*/*")
    for pid in (job.process.pid, job.companion(), *job.ranks()):
        kill(pid, signal.SIGKILL)
    job.process.wait(60)
    assert wait_until(lambda: not job.ranks() and not job.companion())
    done = rankscope("recover", run_folder, "--out", tmp_path / "recovered")
    assert done.returncode == 0, done.stderr
    found = steps_of(tmp_path / "recovered")
    assert {16, 17, 18, 19} <= {*found} <= {*range(15, 21)}, sorted(found)
