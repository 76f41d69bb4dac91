"""The command of `--rs-on-finding`: what waits for it, and one that outlives its time."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rankscope.spool.recordformat import StepEvent
from rankscope.tree.reader import open_trace
from tests import forked
from tests.diagnosis.paper import module, numbers
from tests.launcher.launches import kill
from tests.launcher.test_secrets import PAPER_TOKEN, SCRIPT, TOKEN, holding, hook, showing
from tests.launcher.ways import installed
from tests.tree.ranks_on_paper import PaperRank
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("secrets"), installed]


FINDERS = 40
"""Ranks on paper, each of which finds something of its own."""


def collect(out: Path, command: str) -> subprocess.Popen[bytes]:
    """Start `rankscope collect` with a command for findings."""
    words = ["collect", "--shared", "--out", out, "--world-size", FINDERS]
    words += ["--drain-seconds", 600, "--on-finding", command]
    return forked.Popen(
        [sys.executable, "-m", "rankscope", *map(str, words)],
        stdout=(out.parent / "stdout").open("w"),
        stderr=(out.parent / "stderr").open("w"),
    )


def given_in(path: Path) -> list[dict]:
    """Return what a command was given so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Collected:
    """`rankscope collect` beside ranks on paper; the first call of its command never ends."""

    out: Path
    given: Path
    child: Path


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collected]:
    folder = tmp_path_factory.mktemp("collected")
    found = Collected(folder / "trace", folder / "given", folder / "child")
    for number in range(FINDERS):
        rank = PaperRank(folder, number, FINDERS)
        for step in range(3):  # steps that end are judged
            rank.step(StepEvent.BEGIN, step)
            with rank.call(class_name="Model", step=step):
                for place in range(FINDERS):
                    bad = place == number and step == 1
                    made = np.full((4, 6), np.nan, np.float32) if bad else numbers(place + 100)
                    module(rank, f"m{place}", numbers(place), made, step=step)
            rank.step(StepEvent.END, step)
        rank.ship(found.out, marker=False)
    hang = f"sleep 600 & echo $! > {found.child}; wait"
    command = f"cat >> {found.given}; [ -e {found.child} ] || {{ {hang}; }} # {PAPER_TOKEN}"
    shutil.copytree(found.out, folder / "again" / "trace")
    process = collect(found.out, command)
    yield found
    process.kill()
    process.wait()
    wait_until(lambda: not showing(str(found.out)), 60)  # what goes beside it sees that it is gone
    if found.child.exists():
        kill(int(found.child.read_text()))


def test_what_waits_when_the_job_ends_is_handed_over_behind_the_command_that_runs(
    collected: Collected,
):
    out = collected.out.parent / "again" / "trace"
    given, release = out.parent / "given", out.parent / "release"
    process = collect(out, f"cat >> {given}; while [ ! -e {release} ]; do sleep 0.1; done")
    try:
        assert wait_until(lambda: given_in(given)), (out.parent / "stderr").read_text()
        process.terminate()
        process.wait(300)
        assert len(given_in(given)) == 1
    finally:
        release.touch()
        process.kill()
        process.wait()
    assert wait_until(lambda: len(given_in(given)) == 2)
    first, summary = given_in(given)
    assert first["kind"] and summary["more"] == FINDERS - 1


def test_a_command_that_outlives_its_time_is_ended_with_its_children_and_the_rest_summed_up(
    collected: Collected,
):
    assert wait_until(collected.child.exists), (collected.out.parent / "stderr").read_text()
    child = int(collected.child.read_text())
    assert len(showing(PAPER_TOKEN)) == 1  # the user's own words
    assert wait_until(lambda: len(given_in(collected.given)) > 1)
    assert wait_until(lambda: not Path(f"/proc/{child}").exists(), 10), "its child lives"
    lines = [
        json.loads(line) for line in (collected.out / "findings.jsonl").read_text().splitlines()
    ]
    found = [line for line in lines if "kind" in line]
    assert len(found) == FINDERS
    assert any("was ended after 60 s" in line.get("notice", "") for line in lines)
    assert wait_until(lambda: "kind" not in given_in(collected.given)[-1])
    *told, summary = given_in(collected.given)
    assert told == found[: len(told)] and told
    assert summary["more"] == FINDERS - len(told)
    assert f"{FINDERS - len(told)} more findings" in summary["text"]
    assert shlex.join(["rankscope", "check", str(collected.out)]) in summary["text"]


PLAIN = ["train.py", "--lr", "0.1", "data.path=/data/token/set", "--max-tokens=512", "a=b@c"]
SECRET_WORDS = [
    "--token=T0ps3cr3t", "--api-key", "T0ps3cr3t", "--hubToken", "-T0ps3cr3t",
    "https://me:T0ps3cr3t@host/path", "https://T0ps3cr3t@host/path", "HF_TOKEN=T0ps3cr3t",
    "+wandb.api_key=T0ps3cr3t", "--env=DB_PASSWORD=T0ps3cr3t", '{"api_key": "a T0ps3cr3t"}',
    "https://host/?page=1&sig=T0ps3cr3t", "Authorization: Bearer T0ps3cr3t",
    "--password=a T0ps3cr3t", "https://hooks.slack.com/services/T0ps3cr3t/B1",
    "hf_T0ps3cr3tT0ps3cr3tT0ps3cr3t",
]  # fmt: skip


def test_with_the_variable_alone_it_is_in_no_trace_either_nor_are_tokens_of_the_script(
    tmp_path: Path,
):
    (tmp_path / "train.py").write_text(SCRIPT)
    (meeting := tmp_path / "meeting").mkdir()
    (meeting / "break").touch()
    (meeting / "raise").touch()
    out, given = tmp_path / "trace", tmp_path / "given"
    process = forked.Popen(
        [sys.executable, str(tmp_path / "train.py"), str(meeting), *PLAIN, *SECRET_WORDS],
        stdout=(tmp_path / "stdout").open("w"),
        stderr=(tmp_path / "stderr").open("w"),
        env={
            **os.environ,
            "RANKSCOPE": "1",
            "RANKSCOPE_OUT": str(out),
            "RANKSCOPE_SPOOL": str(tmp_path / "spool"),
            "RANKSCOPE_STEPS": "all",
            "RANKSCOPE_ON_FINDING": hook(tmp_path),
        },
    )
    try:
        assert wait_until(lambda: given.exists() and given.read_text())
        assert showing(TOKEN) == set()
        (header,) = holding(tmp_path, TOKEN)
        assert header.name == "run.json" and header.stat().st_mode & 0o777 == 0o600
    finally:
        (tmp_path / "release").touch()
        (meeting / "leave").touch()
        assert process.wait(300) == 1
    assert wait_until(lambda: (out / "trace.json").exists())
    run = open_trace(out).run
    assert run["settings"]["on-finding"] == "set"
    assert run["argv"][2 : 2 + len(PLAIN)] == PLAIN
    assert len(run["argv"]) == 2 + len(PLAIN) + len(SECRET_WORDS)
    assert "--api-key" in run["argv"] and "https://***@host/path" in run["argv"]
    assert [word for word in run["argv"] if "T0ps3cr3t" in word] == []
    assert holding(out, "T0ps3cr3t") == [] and holding(out, "cannot reach https://***@host")
