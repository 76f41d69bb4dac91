"""`rankscope top` beside real jobs: where ranks are, whom they wait for, who is slow or gone."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from rankscope.diagnosis.check import check
from rankscope.run.jobstatus import read_status
from rankscope.tree.reader import open_trace
from tests.cli.topjobs import starting
from tests.launcher.launches import BIN, Launch, rankscope
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("top"),
    pytest.mark.skipif(
        not entry_points(group="torchrun.logs_specs").select(name="rankscope"),
        reason="needs the start-up file: an environment made by launcher/test",
    ),
]
Start = Callable[..., Launch]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


def ended(job: Launch, rank: int = 0) -> int:
    """The last step that a rank has ended, -1 before the first."""
    path = job.meeting / f"ended.{rank}"
    text = path.read_text() if path.exists() else ""
    return int(text) if text else -1


def top(job: Launch | Path, *options: object, code: int = 0) -> dict[str, Any]:
    folder = job if isinstance(job, Path) else job.out
    done = rankscope("top", folder, "--once", "--json", *options)
    assert done.returncode == code, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    found: dict[str, Any] = answer["result"]
    assert (answer["command"], answer["status"]) == ("top", found["state"])
    return found


def test_a_slow_rank_is_named_with_how_often_and_the_others_wait_for_it(launch: Start) -> None:
    job = launch(["ok", "ok", "slow"])
    assert wait_until(lambda: ended(job) >= 8), job.err
    found: dict[str, Any] = {}

    def is_named() -> bool:  # the records of a rank follow its steps
        found.update(top(job))
        worst = found["worst"][:1]
        return [one["rank"] for one in worst if one["compared_steps"] >= 5] == [2]

    assert wait_until(is_named), found["worst"]
    assert found["state"] == "running" and found["world_size"] == 3 and found["ranks"] == "0-2"
    assert found["hosts"] == 1 and found["ranks_by_state"] == {"running": 3}
    assert found["step"] >= 8 and found["step_s"] > 0.3 and not found["skipped"]
    assert found["records_per_s"] > 50 and found["bytes_per_s"] > 1000
    assert found["lost_records"] == 0 and 0 <= found["spool"]["fill"] < 0.1
    worst = found["worst"][0]
    assert worst["rank"] == 2 and worst["beside_all"] > 1.5, found["worst"]
    assert worst["slow_steps"] >= 0.8 * worst["compared_steps"] >= 5
    (own,) = [group for group in found["groups"] if group["slow"]]
    assert own["ranks"] == "2" and own["beside_all"][0] > 1.5
    assert worst["own_s"] <= worst["step_s"] and 0.5 < worst["beside_history"] < 2
    assert found["check"]["verdict"] in ("clean", "incomplete") and not found["check"]["findings"]
    assert found["check"]["age_s"] > 0
    read = open_trace(job.out)
    # every rank has another batch: losses differ, averaged gradients do not
    assert found["loss"]["ranks"] == 3 and found["loss"]["min"] < found["loss"]["max"]
    assert found["grad_norm"]["min"] == pytest.approx(found["grad_norm"]["max"], rel=1e-6)

    def is_waiting() -> bool:
        return any(
            s.waits_for == (2,) and s.place.op == "all_reduce" and s.place.members == (0, 1, 2)
            for s in read_status(job.out).ranks
            if s.rank != 2
        )

    assert wait_until(is_waiting, 60)
    last_read_at = time.monotonic()
    assert wait_until(lambda: time.monotonic() - last_read_at > 3.3)  # longer than a hang needs
    assert check(read).findings == (), "what was read a while ago does not stand still"
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs
    last = top(job)
    assert last["state"] == "ended" and last["ranks_by_state"] == {"ended": 3}
    assert last["check"]["verdict"] == "clean" and last["groups"][0]["where"] != "-"


def test_of_a_job_in_which_a_rank_was_killed_it_says_which(launch: Start) -> None:
    job = launch(["ok", "dies"])
    assert job.wait() != 0
    found = top(job, code=1)
    assert found["state"] == "ended"
    by_rank = {group["ranks"]: group["state"] for group in found["groups"]}
    assert by_rank["1"] == "lost", found["groups"]
    finding = found["check"]["findings"][0]
    assert finding["kind"] in ("crash", "hang") and finding["ranks"] == [1]


class Terminal:
    """A command on a pseudo-terminal of 80 columns and 24 rows."""

    def __init__(self, *words: object) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [str(BIN / "rankscope"), *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        self.text = ""

    def read(self, pattern: str, seconds: float = 120.0) -> str:
        """Read on until a pattern has come; return what has come since the last time."""
        begin, deadline = len(self.text), time.monotonic() + seconds
        while not re.search(pattern, self.text[begin:]):
            assert time.monotonic() < deadline, self.text[begin:]
            if select.select([self._ours], [], [], 0.2)[0]:
                self.text += os.read(self._ours, 65536).decode()
        return self.text[begin:]

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


def test_the_screen_is_renewed_takes_keys_fits_80_columns_and_gives_the_terminal_back(
    launch: Start,
) -> None:
    job = launch(["ok", "ok", "ok"])
    assert wait_until(lambda: ended(job) >= 3), job.err
    screen = Terminal("top", job.out)
    try:
        screen.read("by rank")
        first = ended(job)
        assert wait_until(lambda: ended(job) >= first + 20)
        screen.read("check \\(.* ago\\): no fault so far in the steps judged while the job runs")
        screen.press("s")
        screen.read("by age")
        screen.press("/")
        screen.read("ranks \\(0-3,8; nothing for all\\)")
        screen.press("1x\r")
        assert "\x1b[H" in screen.read("ranks 1\\)")
        screen.read("1 of 3 ranks")
        screen.press("/")
        screen.read("nothing for all")
        screen.press("9-\r")
        screen.read("ranks: ")
        steps = [int(step) for step in re.findall(r"train step (\d+)", screen.text)]
        assert max(steps) > min(steps) and max(steps) > first
        screen.press("q")
        assert screen.process.wait(60) == 0
        screen.read(re.escape("\x1b[?1049l"))
        assert screen.settings() == screen.before
    finally:
        screen.close()
    plain = re.sub("\x1b\\[[0-9;]*H", "\n", screen.text)
    plain = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", plain)
    assert max(len(line) for line in plain.replace("\r", "").split("\n")) <= 80
    for frame in screen.text.split("\x1b[H")[1:]:
        assert frame.count("\n") <= 23
    assert ended(job) < 1999 and job.process.poll() is None, "nothing was done to the job"


def test_ctrl_c_and_a_terminal_that_goes_away_end_it_and_without_one_it_needs_once(
    launch: Start,
) -> None:
    job = launch(["ok", "ok"])
    assert wait_until(lambda: ended(job) >= 1), job.err
    screen = Terminal("top", job.out, "--no-check")
    try:
        screen.read("by rank")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(60) == 0
    finally:
        screen.close()
    done = rankscope("top", job.out)
    assert done.returncode == 2 and "--once" in done.stderr
    assert job.process.poll() is None


def test_what_it_cannot_show_is_said(tmp_path: Path) -> None:
    for words, said in (
        ((tmp_path, "--once"), "nobody is at work on it"),
        ((tmp_path / "none", "--once"), "no such folder"),
        ((tmp_path, "--json"), "give --once with it"),
        ((tmp_path, "--sort", "name", "--once"), "expected rank, age, time"),
    ):
        done = rankscope("top", *words)
        assert done.returncode == 2 and said in done.stderr, (words, done.stderr)
