"""However a job ends: its exit code and stdout, a tree or the command that makes it, and `verify`
names per rank what happened."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.run.connection import relays_file
from tests import forked
from tests.keyed import key_file
from tests.launcher.launches import (
    Launch,
    kill,
    rankscope,
    run_named_command,
    wait_until_it_watches,
)
from tests.launcher.ways import installed
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("ends"),
    installed,
]
Start = Callable[..., Launch]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    """Start jobs in folders of their own: `launch("name", ways, options...)`."""
    started: list[Launch] = []

    def start(name: str, ways: list[str], *options: object, **how: Any) -> Launch:
        started.append(Launch(tmp_path / name, ways, *options, **how))
        return started[-1]

    yield start
    for job in started:
        job.stop()


def verified(trace: Path) -> dict[str, Any]:
    done = rankscope("verify", trace, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["status"] == "clean" else 1), done.stderr
    report: dict[str, Any] = {"status": answer["status"], **answer["result"]}
    return report


def ends(report: dict[str, Any]) -> dict[int, str]:
    """How the newest life of each rank ended."""
    return {rank["rank"]: rank["end"] for rank in report["ranks"]}


def all_there(report: dict[str, Any]) -> bool:
    return all(
        rank["committed"] == rank["received"] > 0 and not rank["dropped"] and not rank["notes"]
        for rank in report["ranks"]
    )


def is_empty(spool: Path) -> bool:
    return not spool.exists() or not any(spool.iterdir())


def test_every_way_a_rank_can_end_keeps_its_records_and_is_named(launch: Start):
    """One failed rank has torchelastic end the others by SIGTERM: that is the one that sleeps."""
    ways = ["exit", "raise", "os._exit", "sigkill", "abort", "segfault", "sleep", "early", "import"]
    job = launch("job", ways)
    assert job.wait() == 1
    said = sorted(line.split()[:2] for line in job.stdout.splitlines())
    assert said == sorted([str(rank), way] for rank, way in enumerate(ways[:7]))
    assert job.last_line == f"rankscope: trace in {job.out}, incomplete: rankscope verify trace"
    report = verified(job.out)
    assert ends(report) == {0: "exit", 1: "raised", **dict.fromkeys(range(2, 7), "lost")}
    assert report["missing"] == "7-8"
    assert all_there(report)
    text = rankscope("verify", job.out).stdout
    assert "ranks 2-6: gone without an end record: killed by a signal, aborted" in text
    assert "nothing at all from ranks 7-8" in text
    assert is_empty(job.spool)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.lab)]
)
def test_a_signal_to_the_launcher_ends_the_ranks_and_leaves_the_tree(
    number: signal.Signals, launch: Start
):
    job = launch("job", ["wait"])
    job.trained()
    wait_until_it_watches(job.process.pid)
    job.process.send_signal(number)
    assert job.wait() == 1
    assert "read it: rankscope show trace" in job.last_line, job.logs
    report = verified(job.out)
    assert ends(report) == {0: "lost"}
    assert all_there(report)
    assert is_empty(job.spool)


def test_ctrl_c_ends_the_job_and_a_second_one_the_waiting_for_its_tree(launch: Start):
    job = launch("job", ["wait"])
    job.trained()
    wait_until_it_watches(job.process.pid)
    companion = job.companion()
    kill(companion, signal.SIGSTOP)  # a tree that takes long
    os.killpg(job.process.pid, signal.SIGINT)
    assert wait_until(lambda: [*job.spool.glob("*/*/job-over")])
    assert job.process.poll() is None
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait() == 1
    assert f"the trace follows in {job.out}; read it then: rankscope show trace" in job.last_line
    assert "was not finished" not in job.err
    kill(companion, signal.SIGCONT)
    assert wait_until(lambda: (job.out / "trace.json").exists())
    report = verified(job.out)
    assert set(ends(report)) == {0}
    assert all_there(report)
    assert wait_until(lambda: is_empty(job.spool))


def test_killed_companions_are_started_again_beside_another_run_of_the_same_host(launch: Start):
    """And a job that is told to wait no second for its tree says where the tree will be."""
    job = launch("job", ["wait", "wait"], "--rs-steps", "all")
    other = launch("other", ["wait"], "--rs-finish-seconds", 0)
    job.trained()
    for _ in range(3):
        before = job.companion()
        assert before
        kill(before)
        assert wait_until(lambda before=before: job.companion() not in {0, before})
    job.go()
    assert job.wait() == 0
    assert job.last_line == f"rankscope: trace in {job.out}; read it: rankscope show trace"
    report = verified(job.out)
    assert report["status"] == "clean"
    assert ends(report) == {0: "exit", 1: "exit"}
    steps = json.loads((job.out / "trace.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [*range(len(steps))]
    assert is_empty(job.spool)
    other.trained()
    other.go()
    assert other.wait() == 0
    assert f"the trace follows in {other.out}" in other.last_line
    assert wait_until(lambda: (other.out / "trace.json").exists())
    assert verified(other.out)["status"] == "clean"
    assert wait_until(lambda: is_empty(other.spool))


def test_a_killed_launcher_leaves_a_tree_or_what_recover_makes_one_of(launch: Start):
    """Its ranks live on. With the companion killed as well nobody builds the tree: the records
    stay, and what they were recovered from is removed."""
    job, alone = (launch(name, ["pause"]) for name in ("job", "alone"))
    for each in (job, alone):
        each.trained()
    # killed once records have come: before that there is no trace yet
    assert wait_until(lambda: any((alone.out / "spool").glob("*.cells")))
    for each in (job, alone):
        kill(each.process.pid)
        each.process.wait()
    kill(alone.companion())
    assert len(job.ranks()) == len(alone.ranks()) == 1
    for each in (job, alone):
        each.go()
    assert wait_until(lambda: (job.out / "trace.json").exists())
    assert verified(job.out)["status"] == "clean"
    assert wait_until(lambda: is_empty(job.spool))
    assert wait_until(lambda: not alone.ranks())
    assert not (alone.out / "trace.json").exists()
    (run_folder,) = alone.spool.glob("*/*")
    said = rankscope("verify", alone.out).stdout
    assert "may still be running" not in said  # nobody lives who would go on
    assert f"rankscope recover {run_folder} {alone.out}" in said
    made = rankscope("recover", run_folder, alone.out, "--out", alone.folder / "made")
    assert made.returncode == 0, made.stderr
    assert f"removed {run_folder}" in made.stdout
    assert verified(alone.folder / "made")["status"] == "clean"
    assert is_empty(alone.spool)


def test_a_job_that_is_over_while_its_collector_is_down_names_what_finishes_it(launch: Start):
    address = f"tcp://127.0.0.1:{free_port()}"
    keys = ["--rs-keys", relays_file(key_file())]
    job = launch("job", ["exit"], "--rs-collector", address, *keys, "--rs-finish-seconds", 1)
    assert job.wait() == 0
    assert f"the collector at {address} has not finished the trace" in job.last_line
    companion = job.companion()  # a collector may yet be started there, for a second more
    if companion:
        kill(companion)
    assert wait_until(lambda: not job.companion())
    made = run_named_command(job.last_line, job.folder)
    assert verified(made)["status"] == "clean"
    assert is_empty(job.spool)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until the disk takes no more."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize(
    "options",
    [pytest.param([], marks=pytest.mark.lab), ["--rs-collector", "shared"]],
    ids=["socket", "shared"],
)
@pytest.mark.parametrize("is_full_first", [True, False], ids=["before-the-job", "during-it"])
def test_a_full_disk_under_the_trace_harms_no_training_and_is_said(
    is_full_first: bool, options: list[str], launch: Start, small_disk: Path
):
    """Also where not even the name of the run can be written when the relay first calls."""
    if is_full_first:
        fill(small_disk / "ballast")
    options = ["--rs-steps", "all", "--rs-finish-seconds", "600", *options]
    job = launch("job", ["wait"], *options, out=str(small_disk / "trace"))
    job.trained()
    if not is_full_first:
        replicas = small_disk / "trace/spool"
        assert wait_until(lambda: any(path.stat().st_size for path in replicas.glob("*.cells")))
        fill(small_disk / "ballast")
    size = sum(path.lstat().st_size for path in (small_disk / "trace").glob("spool/*"))
    job.go()
    assert job.wait() == 0
    plain = forked.run(
        [sys.executable, job.folder / "script.py", job.meeting, "exit"],
        env={**os.environ, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert job.stdout.split()[2:] == plain.stdout.split()[2:]  # every bit of every loss
    assert "its disk is full" in job.last_line
    assert sum(path.lstat().st_size for path in (small_disk / "trace").glob("spool/*")) >= size
    line = job.last_line.replace(f"--out {small_disk}/trace-recovered", "--out made")
    made = run_named_command(line, job.folder)
    assert verified(made)["status"] == "clean"
    assert is_empty(job.spool)


def test_a_spool_disk_without_room_costs_the_trace_before_the_job_starts(
    tmp_path: Path, small_disk: Path
):
    script = tmp_path / "script.py"
    script.write_text("print('it ran')")
    done = rankscope("run", "--rs-spool", small_disk, "--rs-out", tmp_path / "t", script)
    assert done.returncode == 0
    assert done.stdout == "it ran\n"
    assert "needs 256 MiB for the spools, 1 MiB are free" in done.stderr
    assert "--rs-spool" in done.stderr
    assert not (tmp_path / "t").exists()
